"""Gives replayed calls a prompt, so that traces run on real engines too.

A replayed call carries true lengths (`StageRequest.simulated`) and no text. In front of a real
engine it gets a prompt of common words of about that many tokens, and an output held at its length
by `ignore_eos`, which vLLM, SGLang and llama.cpp know. Parts of a prefix chain give equal words for
equal ids, so what would be found in a cache is. Other calls pass unchanged.
"""

from collections.abc import AsyncGenerator

import msgspec
import numpy as np

from shared.contracts.messages import BoundCall
from shared.domain.instance import InstanceSpec
from shared.domain.trace import PrefixPart
from shared.ports import Engine, EngineEvent

WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
)


class ReplayedPrompts:
    """Implements `Engine` on another one.

    Args:
        engine: What runs the calls.
        spec: A description to give instead of the engine's own: with a speed that was measured.
    """

    def __init__(self, engine: Engine, spec: InstanceSpec | None = None) -> None:
        self._engine = engine
        self._spec = spec

    @property
    def spec(self) -> InstanceSpec:
        """Return the instance's description."""
        return self._spec or self._engine.spec

    def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Run one call; see `Engine.generate`."""
        return self._engine.generate(with_prompt(call), engine_id)

    def has_room_for(self, call: BoundCall) -> bool:
        """Return whether the call would be batched now."""
        return self._engine.has_room_for(call)

    async def room_changed(self) -> None:
        """Return when there may be room; see `Engine.room_changed`."""
        await self._engine.room_changed()

    def kv_used_tokens(self) -> int:
        """Return the KV cache in use, tokens."""
        return self._engine.kv_used_tokens()

    def foreign_s(self) -> float:
        """Return the load from outside the mesh, mesh seconds of work."""
        return self._engine.foreign_s()

    async def wait_dead(self) -> None:
        """Return when the engine has died."""
        await self._engine.wait_dead()


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
