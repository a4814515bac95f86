"""The Text-to-SQL workflow: stage names, shared prompt templates, published statistics.

Source: aggregate statistics of the traces released with HexGen-Flow (arXiv 2505.05286), whose
workload is a CHESS-style agent on BIRD. Only means, percentiles and template lengths are kept.

A query runs, in this order:

1. `information_retriever`, then (two queries in three) `extract_keywords`, then
   `information_retriever` three more times;
2. `generate_candidate`: two parallel calls with two different templates;
3. `revise`: 0 to 10 times, one after the other, while the SQL fails;
4. `unit_tester`, then `generate_unit_test`, then `unit_tester`, then `evaluate` (usually 3 to 6
   parallel calls), then `unit_tester`. A few queries skip `generate_unit_test` and, with it,
   `evaluate`.
"""

from collections.abc import Sequence

import msgspec

from shared.domain.trace import PrefixPart

WORKFLOW = "text2sql"

INFORMATION_RETRIEVER = "information_retriever"
EXTRACT_KEYWORDS = "extract_keywords"
GENERATE_CANDIDATE = "generate_candidate"
REVISE = "revise"
UNIT_TESTER = "unit_tester"
GENERATE_UNIT_TEST = "generate_unit_test"
EVALUATE = "evaluate"

STAGES = (
    INFORMATION_RETRIEVER,
    EXTRACT_KEYWORDS,
    GENERATE_CANDIDATE,
    REVISE,
    UNIT_TESTER,
    GENERATE_UNIT_TEST,
    EVALUATE,
)
PARALLEL_STAGES = frozenset({GENERATE_CANDIDATE, EVALUATE})

MAX_REVISE = 10
KEYWORDS_PROBABILITY = 2 / 3
UNIT_TEST_PROBABILITY = 86 / 90
NATURAL_REVISE_PROBABILITY = 0.3
NATURAL_REVISE_AGAIN_PROBABILITY = 0.5
EVALUATE_SIBLINGS = {3: 0.12, 4: 0.10, 5: 0.35, 6: 0.43}

CANDIDATE_TEMPLATE_TOKENS = (9_158, 5_292)
TEMPLATE_TOKENS = {
    INFORMATION_RETRIEVER: 213,
    EXTRACT_KEYWORDS: 630,
    REVISE: 3_059,
    UNIT_TESTER: 213,
    GENERATE_UNIT_TEST: 436,
    EVALUATE: 261,
}


class Lengths(msgspec.Struct, frozen=True):
    """Statistics of one length: mean, and 5th, 50th and 95th percentile, tokens."""

    mean: float
    p5: float
    p50: float
    p95: float


class StageStatistics(msgspec.Struct, frozen=True):
    """Published lengths of one stage's calls."""

    input: Lengths
    output: Lengths


STATISTICS = {
    INFORMATION_RETRIEVER: StageStatistics(Lengths(306, 301, 306, 312), Lengths(7, 4, 5, 32)),
    EXTRACT_KEYWORDS: StageStatistics(Lengths(669, 635, 666, 702), Lengths(44, 15, 47, 58)),
    GENERATE_CANDIDATE: StageStatistics(
        Lengths(10_000, 7_879, 10_082, 12_145), Lengths(680, 413, 670, 1_010)
    ),
    REVISE: StageStatistics(Lengths(5_954, 5_710, 5_918, 6_274), Lengths(82, 20, 81, 144)),
    UNIT_TESTER: StageStatistics(Lengths(275, 271, 275, 278), Lengths(5, 4, 4, 6)),
    GENERATE_UNIT_TEST: StageStatistics(
        Lengths(1_110, 932, 1_130, 1_226), Lengths(102, 42, 106, 134)
    ),
    EVALUATE: StageStatistics(Lengths(960, 794, 1_005, 1_090), Lengths(29, 22, 22, 72)),
}


def template_chains(stage: str, inputs: Sequence[int]) -> list[tuple[PrefixPart, ...]]:
    """Return the prefix chain of every sibling of a stage: its shared prompt template.

    Sibling candidates use different templates: of two, the longer prompt has the longer one. A
    candidate without a sibling has the longest template it can hold. A prompt shorter than its
    template shares nothing.

    Args:
        stage: Stage name; an unknown one shares nothing.
        inputs: Prompt lengths of the siblings, tokens.
    """
    if stage == GENERATE_CANDIDATE:
        return _candidate_chains(inputs)
    tokens = TEMPLATE_TOKENS.get(stage)
    if tokens is None:
        return [() for _ in inputs]
    return [_chain(f"{WORKFLOW}/{stage}", tokens, length) for length in inputs]


def _candidate_chains(inputs: Sequence[int]) -> list[tuple[PrefixPart, ...]]:
    longest = max(inputs, default=0)
    long_tokens, short_tokens = CANDIDATE_TEMPLATE_TOKENS
    chains = []
    for length in inputs:
        is_long = length > long_tokens and (length == longest or len(inputs) == 1)
        tokens = long_tokens if is_long else short_tokens
        name = "long" if is_long else "short"
        chains.append(_chain(f"{WORKFLOW}/{GENERATE_CANDIDATE}/{name}", tokens, length))
    return chains


def _chain(prefix_id: str, tokens: int, length: int) -> tuple[PrefixPart, ...]:
    if tokens > length:
        return ()
    return (PrefixPart(prefix_id, tokens),)
