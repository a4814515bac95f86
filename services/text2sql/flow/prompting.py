"""Steps that need no code of their own: fill templates, keep the answers."""

import hashlib
from collections.abc import Sequence
from string import Template
from typing import Any

from services.text2sql.flow.definition import StageDef
from services.text2sql.flow.step import Context, Ended
from shared.contracts.messages import CallOutcome
from shared.domain.trace import PrefixPart
from shared.sdk import Call

BYTES_PER_TOKEN = 4
MIN_PREFIX_TOKENS = 16


def prefix_of(*texts: str) -> tuple[PrefixPart, ...]:
    """Return the prefix chain of a prompt that begins with these texts, shared with others."""
    parts = []
    for text in texts:
        tokens = len(text.encode()) // BYTES_PER_TOKEN
        if tokens < MIN_PREFIX_TOKENS:
            break
        name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        parts.append(PrefixPart(name, tokens))
    return tuple(parts)


def chat_call(
    stage: StageDef,
    system: str,
    user: str,
    *,
    shared: str = "",
    extra: dict[str, Any] | None = None,
) -> Call:
    """Return a chat call.

    Args:
        stage: For limits and sampling.
        system: System message; the same text in every query is shared.
        user: User message.
        shared: The beginning of `user` that other queries have too.
        extra: Other engine fields.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    sampling: dict[str, Any] = {"temperature": stage.temperature}
    if stage.stop:
        sampling["stop"] = list(stage.stop)
    return Call(
        messages=tuple(messages),
        max_tokens=stage.max_tokens,
        sampling=sampling,
        extra=extra or {},
        prefix=prefix_of(*filter(None, (system, shared))),
    )


class PromptStep:
    """The step `prompt`: one call per template or per item; outputs are kept by stage name.

    Args:
        context: The query.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return one call per item of `for_each`, else one per template."""
        if number and stage.keep == "text":
            return []
        values = {name: _shown(value) for name, value in self._context.outputs.items()}
        if stage.for_each:
            items = _items(self._context.outputs.get(stage.for_each, ()))
            prompts = [stage.prompts[min(n, len(stage.prompts) - 1)] for n in range(len(items))]
        else:
            items, prompts = [""] * len(stage.prompts), list(stage.prompts)
        return [
            chat_call(
                stage,
                Template(stage.system).safe_substitute(values),
                Template(prompt).safe_substitute(values, item=item),
            )
            for prompt, item in zip(prompts, items, strict=True)
        ]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Keep the answers; a query none of whose calls completed ends as they did."""
        del number
        done = [outcome.text or "" for outcome in outcomes if outcome.kind == "completed"]
        if not done:
            first = outcomes[0]
            raise Ended(first.kind, first.reason, first.detail)
        output: Any = done if len(outcomes) > 1 else done[0]
        if stage.keep == "lines":
            output = [line for text in done for line in _items(text)]
        self._context.outputs[stage.name] = output
        return False


def _items(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    return [line.strip(" \t-*•") for line in str(value).splitlines() if line.strip(" \t-*•")]


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(f"{n}. {one}" for n, one in enumerate(value, 1))
    return str(value)
