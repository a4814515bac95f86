"""Gives replayed calls a prompt, so that traces run on real engines too.

A replayed call carries true lengths (`StageRequest.simulated`) and no text. In front of a real
engine it gets a prompt of common words of about that many tokens, and an output held at its length
by `ignore_eos`, which vLLM, SGLang and llama.cpp know. Parts of a prefix chain give equal words for
equal ids, so what would be found in a cache is. Other calls pass unchanged.

A server that has no plain completions gets the prompt as what a user says in a chat.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import numpy as np

from shared.adapters.engine_around import EngineAround
from shared.contracts.messages import BoundCall
from shared.domain.trace import PrefixPart
from shared.errors import WrongServer
from shared.ports import EngineEvent

WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
)


class ReplayedPrompts(EngineAround):
    """Gives replayed calls their prompts, and runs them on another engine."""

    _has_chat_only = False

    async def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Run one call; see `Engine.generate`."""
        given = with_prompt(call)
        is_replayed = given is not call
        if not (is_replayed and self._has_chat_only):
            try:
                async with aclosing(self._engine.generate(given, engine_id)) as events:
                    async for event in events:
                        yield event
            except WrongServer:  # comes before any event
                if not is_replayed:
                    raise
            else:
                return
        async with aclosing(self._engine.generate(as_chat(given), engine_id)) as events:
            async for event in events:
                self._has_chat_only = True
                yield event


def as_chat(call: BoundCall) -> BoundCall:
    """Return a call whose prompt is what a user says."""
    request = call.request
    said = {"role": "user", "content": request.prompt}
    return msgspec.structs.replace(
        call, request=msgspec.structs.replace(request, prompt=None, messages=(said,))
    )


def with_prompt(call: BoundCall) -> BoundCall:
    """Return a replayed call with a prompt; any other as it is."""
    request = call.request
    lengths = request.simulated
    if lengths is None:
        return call
    return msgspec.structs.replace(
        call,
        request=msgspec.structs.replace(
            request,
            prompt=prompt_of(request.request_id, lengths.input_tokens, request.prefix),
            messages=None,
            max_tokens=lengths.output_tokens,
            sampling={"temperature": 0.0, **request.sampling},
            extra={"ignore_eos": True, **request.extra},
            simulated=None,
        ),
    )


def prompt_of(name: str, num_tokens: int, prefix: tuple[PrefixPart, ...] = ()) -> str:
    """Return a prompt of about so many tokens; equal prefixes begin with equal words.

    Args:
        name: Draws the words after the prefix: equal names give equal ones.
        num_tokens: Its length, tokens.
        prefix: What it begins with.
    """
    head = [word for part in prefix for word in words(part.prefix_id, part.tokens)][:num_tokens]
    return " ".join([*head, *words(name, max(1, num_tokens - len(head)))])


def words(name: str, count: int) -> list[str]:
    """Return so many words, drawn by a name."""
    rng = np.random.default_rng(list(name.encode()))
    return [WORDS[index] for index in rng.integers(0, len(WORDS), count)]
