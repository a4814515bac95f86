"""What an OpenAI-compatible server tells of itself: its models, context, slots and KV cache."""

from typing import NamedTuple

import msgspec
import structlog

from shared.adapters.openai_http import UpstreamClient
from shared.adapters.openai_load import MAX_KV_TOKENS
from shared.adapters.openai_params import OpenAIParams
from shared.contracts.messages import MAX_TOKENS
from shared.domain.instance import InstanceSpec
from shared.domain.near_names import did_you_mean
from shared.errors import (
    CallRefused,
    ConfigError,
    GenerationFailed,
    TransientError,
    WrongServer,
)
from shared.ports import Clock

MODELS = "/v1/models"
POLL_S = 0.5
UNNAMED = "default"  # an instance's model where nobody named one
MAX_SLOTS = 65_536
"""Above what any server batches; a number beyond it is a mistake that memory would pay for."""
log = structlog.get_logger(__name__)


class ServerFacts(NamedTuple):
    """What a server tells.

    Attributes:
        models: Names it serves, its own first; aliases count.
        max_context_tokens: Longest prompt plus output, tokens; 0 where it does not say.
        num_slots: Most calls it batches; likewise.
        kv_tokens: Room of its KV cache, tokens; likewise.
        block_tokens: Its KV block size, tokens; likewise.
    """

    models: tuple[str, ...]
    max_context_tokens: int = 0
    num_slots: int = 0
    kv_tokens: int = 0
    block_tokens: int = 0

    def name_of(self, chosen: str, model: str) -> str:
        """Return the server's name of the instance's model.

        Args:
            chosen: The name set for it; empty: none.
            model: The instance's own name of it.

        Raises:
            ConfigError: The server has no such model.
        """
        wanted = chosen or model
        if wanted in self.models or not self.models:
            return wanted
        if not chosen and len(self.models) == 1:
            return self.models[0]
        theirs = ", ".join(self.models)
        how = "--model, WORKER_OPENAI__MODEL, or `model` in the fleet file"
        if not chosen and wanted == UNNAMED:
            raise ConfigError(f"the server has several models, {theirs}: name one of them: {how}")
        hint = did_you_mean(wanted, self.models) or ";"
        raise ConfigError(
            f"the server has no model {wanted!r}{hint} it has {theirs}; name one of them: {how}"
        )


async def wait_for_server(
    client: UpstreamClient, params: OpenAIParams, clock: Clock
) -> ServerFacts:
    """Return what a server tells as soon as it answers.

    Raises:
        ConfigError: It refuses the key, or is no such server.
        TransientError: It did not answer within `startup_s`.
    """
    give_up_at_s = clock.monotonic_s() + params.startup_s
    while True:
        try:
            return await ask(client)
        except CallRefused as exc:
            raise ConfigError(f"{params.url} is no OpenAI-compatible server: {exc}") from exc
        except WrongServer as exc:
            raise ConfigError(f"{params.url} refuses: {exc}") from exc
        except GenerationFailed as exc:
            if clock.monotonic_s() >= give_up_at_s:
                raise TransientError(
                    f"{params.endpoint(MODELS)} did not answer within {params.startup_s:g} s: {exc}"
                ) from exc
        await clock.sleep_wall(POLL_S)


async def ask(client: UpstreamClient) -> ServerFacts:
    """Return what a server tells.

    Raises:
        GenerationFailed: It does not answer as such a server does.
    """
    listed = await client.get_json(MODELS)
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        raise CallRefused(f"{MODELS} lists no models")
    own = [entry for entry in entries if isinstance(entry, dict)]
    names = [name for entry in own for name in _names(entry)]
    load = await client.load()
    return ServerFacts(
        models=tuple(dict.fromkeys(names)),
        max_context_tokens=max((_context(entry) for entry in own), default=0),
        num_slots=await _num_slots(client) if _is_llamacpp(own) else 0,
        kv_tokens=load.kv_tokens if load else 0,
        block_tokens=load.block_tokens if load else 0,
    )


def resolve(spec: InstanceSpec, facts: ServerFacts) -> InstanceSpec:
    """Return an instance's description with what its server told put over it.

    A batch that is declared smaller than the server's stays so: it was measured to be enough.
    """
    changes: dict[str, int] = {}
    if facts.max_context_tokens:
        changes["max_context_tokens"] = facts.max_context_tokens
    if facts.num_slots:
        changes["max_num_seqs"] = min(spec.max_num_seqs, facts.num_slots)
        kv_tokens = facts.num_slots * (facts.max_context_tokens or spec.max_context_tokens)
        changes["kv_tokens"] = min(MAX_KV_TOKENS, kv_tokens)
    if facts.kv_tokens:
        changes["kv_tokens"] = facts.kv_tokens
        changes["block_tokens"] = facts.block_tokens
    resolved = msgspec.structs.replace(spec, **changes)
    if resolved != spec:
        log.info("engine_resolved", instance_id=spec.instance_id, **changes)
    return resolved


def _names(entry: dict[str, object]) -> list[str]:
    aliases = entry.get("aliases")
    found = [entry.get("id"), *(aliases if isinstance(aliases, list) else [])]
    return [name for name in found if isinstance(name, str) and name]


def _context(entry: dict[str, object]) -> int:
    """Return a model's context: vLLM's and SGLang's `max_model_len`, llama.cpp's `meta.n_ctx`."""
    meta = entry.get("meta")
    inner = meta.get("n_ctx") if isinstance(meta, dict) else None
    for value in (entry.get("max_model_len"), inner):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, int) and is_number and 0 < value <= MAX_TOKENS:
            return value
    return 0


def _is_llamacpp(entries: list[dict[str, object]]) -> bool:
    return any(entry.get("owned_by") == "llamacpp" for entry in entries)


async def _num_slots(client: UpstreamClient) -> int:
    try:
        props = await client.get_json("/props")
    except GenerationFailed:
        return 0
    slots = props.get("total_slots") if isinstance(props, dict) else 0
    # No `isinstance`: JSON's true is an int too.
    return slots if type(slots) is int and 0 < slots <= MAX_SLOTS else 0
