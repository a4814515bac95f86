"""What is expected of a workflow: lengths per stage, and what usually still follows.

Kept in tokens and counts, not in seconds, so it holds on any fleet.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

NonNegative = Annotated[float, Meta(ge=0, le=1e12)]


class StageEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of one stage of a workflow.

    Attributes:
        input_tokens: Mean prompt length, tokens.
        output_tokens: Mean output length of one call, tokens.
        max_output_tokens: Mean of the longest output among a stage's siblings, tokens; 0 means
            the same as `output_tokens`.
        cached_tokens: Mean prompt tokens found cached on a warm instance, tokens.
        siblings: Mean number of parallel calls.
        num_seen: How many calls this rests on; 0 for a prior.
        bytes_per_token: Mean prompt bytes per token as the engine counts them; 0 means unknown.
    """

    input_tokens: NonNegative
    output_tokens: NonNegative
    max_output_tokens: NonNegative = 0.0
    cached_tokens: NonNegative = 0.0
    siblings: NonNegative = 1.0
    num_seen: Annotated[int, Meta(ge=0)] = 0
    bytes_per_token: NonNegative = 0.0


class WorkflowShape(msgspec.Struct, frozen=True, kw_only=True):
    """Expected stages of a workflow and what remains after each.

    Attributes:
        workflow: Workflow name.
        stages: stage name -> what is expected of one occurrence.
        remaining: `"<stage>/<iteration>"` -> stage name -> expected number of later occurrences
            of that stage, given that this occurrence runs; iterations above the last known one
            use the last.
    """

    workflow: str
    stages: dict[str, StageEstimate]
    remaining: dict[str, dict[str, NonNegative]] = {}
