"""Real engines for a mesh on this machine: a llama.cpp of our own, or servers that run already.

What an instance's speed is, is measured before it is used: from a fleet file that `hexflow profile`
wrote, or else by a few short calls at the start.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console

from services.cli.console import counted
from services.cli.cores import left_alone
from services.cli.probing import Prober, lone_tokens_per_s, plan_experiment, quick_scale
from services.cli.workload import load_fleet
from shared.adapters.clock import SystemClock
from shared.adapters.llamacpp_server import LlamaCppParams, LlamaCppServer
from shared.adapters.local_kafka import default_cache_dir
from shared.adapters.openai_engine import OpenAIEngine
from shared.adapters.openai_http import UpstreamClient
from shared.adapters.openai_load import ServerLoad
from shared.adapters.openai_params import OpenAIParams
from shared.adapters.replayed_prompts import ReplayedPrompts
from shared.adapters.simulated_engine import SimulatedEngine
from shared.adapters.small_model import MODEL_NAME, fetch_gguf
from shared.adapters.vllm_engine import VllmEngine
from shared.adapters.vllm_environment import converted_dir
from shared.adapters.vllm_params import VllmParams
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.errors import ConfigError, GenerationFailed
from shared.ports import Clock, Engine
from shared.scheduling.knee import knee_calls
from shared.simulation.latency_fit import fit_latency

STARTUP_S = 5.0
MEASURING_S = 60.0
GUESSING = "asking {} a few short calls, for a first guess of its speed ..."
GUESSED = "{}: {} calls at a time, {:.0f} tokens/s for one alone (hexflow profile measures better)"
LEAST_GUESSED_CALLS = 4
VLLM_BATCH_TOKENS = 512
VLLM_BLOCK_TOKENS = 32
EngineName = Literal["llamacpp", "openai", "vllm"]
OpenEngine = Callable[[InstanceSpec, Clock], AbstractAsyncContextManager[Engine]]
Specs = tuple[InstanceSpec, ...]
ReadLoad = Callable[[str], Awaitable[ServerLoad | None]]
"""Instance -> what its engine's own metrics say; None where it has none."""
PLACEHOLDER = LatencyModel(prefill_s_per_token=1e-3, weights_s=0.02)


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which real engines to use.

    Attributes:
        engine: `llamacpp` or `vllm` (started here) or `openai` (they run already).
        urls: Their addresses, with `openai`.
        api_key: Sent to them.
        model: The servers' name of the model; empty: the only one they serve.
        model_file: GGUF file, with `llamacpp`; None: the small model.
        fleet: Fleet file with their speeds, in the same order; None: measured at the start.
        num_slots: Calls that an engine started here batches.
        slot_tokens: Context of each of them, tokens.
        num_threads: Threads of a llama.cpp; 0: one per core, less one.
        cores: Cores it is held on, which the mesh then leaves to it; empty: all.
        is_bounded: Whether an instance is said to take no more calls at a time than its knee; a
            profile has to see how the engine does with more.
        tells_load: Whether a vLLM started here keeps the statistics that `Fleet.read_load` reads.
    """

    engine: EngineName = "llamacpp"
    urls: tuple[str, ...] = ()
    api_key: str | None = None
    model: str = ""
    model_file: Path | None = None
    fleet: Path | None = None
    num_slots: int = 4
    slot_tokens: int = 2_048
    num_threads: int = 0
    cores: tuple[int, ...] = ()
    is_bounded: bool = True
    tells_load: bool = False


async def _untold(_: str) -> None:
    """Answer for engines without metrics."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Instances, and how a mesh gets their engines."""

    specs: tuple[InstanceSpec, ...]
    open_engine: OpenEngine = SimulatedEngine.open
    """In this process."""
    worker_variables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Instance -> variables by which a worker process finds its engine."""
    read_load: ReadLoad = _untold
    is_real: bool = False


@asynccontextmanager
async def fleet_of(
    choice: EngineChoice | None, fleet: str, console: Console
) -> AsyncIterator[Fleet]:
    """Have a fleet for as long as the block lasts: real engines, or the simulated ones named.

    Raises:
        ConfigError: There is no such fleet, or see `open_real`.
        TransientError: A server does not answer.
    """
    if choice is None:
        yield Fleet(specs=load_fleet(fleet))
        return
    async with open_real(choice, console) as engines:
        yield engines


@asynccontextmanager
async def open_real(choice: EngineChoice, console: Console) -> AsyncIterator[Fleet]:
    """Have real engines for as long as the block lasts; those started here end with it.

    Raises:
        ConfigError: A model, package or server is missing, or a server is none.
        TransientError: A server does not answer.
    """
    listed = None if choice.fleet is None else _listed(choice.fleet, len(choice.urls) or 1)
    if choice.engine == "vllm":
        async with _own_vllm(choice, listed, console) as fleet:
            yield fleet
        return
    async with AsyncExitStack() as stack:
        if choice.engine == "llamacpp":
            server = await stack.enter_async_context(_own_llamacpp(choice, console))
            named = {"llamacpp-0": OpenAIParams(url=server.url)}
        else:
            named = {
                f"openai-{index}": OpenAIParams(
                    url=url, model=choice.model, api_key=choice.api_key, startup_s=STARTUP_S
                )
                for index, url in enumerate(choice.urls)
            }
        if not named:
            raise ConfigError("name at least one server: --openai URL")
        specs = await _describe(choice, named, listed, console)
        servers = dict(zip((spec.instance_id for spec in specs), named.values(), strict=True))

        @asynccontextmanager
        async def open_engine(spec: InstanceSpec, clock: Clock) -> AsyncIterator[Engine]:
            async with OpenAIEngine.open(spec, servers[spec.instance_id], clock) as engine:
                yield ReplayedPrompts(engine)

        clients = {
            name: await stack.enter_async_context(UpstreamClient.open(params))
            for name, params in servers.items()
        }

        async def read_load(instance_id: str) -> ServerLoad | None:
            return await clients[instance_id].load()

        yield Fleet(
            specs=specs,
            open_engine=open_engine,
            worker_variables={name: _worker_variables(one) for name, one in servers.items()},
            read_load=read_load,
            is_real=True,
        )


@asynccontextmanager
async def _own_llamacpp(choice: EngineChoice, console: Console) -> AsyncIterator[LlamaCppServer]:
    def say(text: str) -> None:
        console.print(f"{text} ...", style="dim")

    path, name = choice.model_file, choice.model
    if path is None:
        path = await asyncio.to_thread(fetch_gguf, default_cache_dir(os.environ), say)
        name = name or MODEL_NAME
    with tempfile.TemporaryDirectory(prefix="hexflow-llamacpp-") as folder:
        server = LlamaCppServer(
            LlamaCppParams(
                model_path=str(path),
                model_name=name or path.stem,
                num_slots=choice.num_slots,
                slot_tokens=choice.slot_tokens,
                num_threads=choice.num_threads,
                cores=choice.cores,
            ),
            Path(folder) / "llamacpp.log",
        )
        say(f"starting llama.cpp with {path.name}")
        try:
            await asyncio.to_thread(server.start)
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(server.keep_running(), name="llamacpp")
                try:
                    with left_alone(choice.cores):
                        yield server
                finally:
                    keeping.cancel()
        finally:
            await asyncio.to_thread(server.stop)


@asynccontextmanager
async def _own_vllm(
    choice: EngineChoice, listed: Specs | None, console: Console
) -> AsyncIterator[Fleet]:
    """Have one vLLM in this process; it is started once, measured, and then served."""
    model = choice.model_file or converted_dir(default_cache_dir(os.environ))
    if not model.is_dir():
        raise ConfigError(f"there is no model in {model}; hexflow model --vllm makes the small one")
    cores = ",".join(map(str, choice.cores)) or None
    params = VllmParams(
        model=str(model),
        max_model_len=choice.slot_tokens,
        max_num_seqs=choice.num_slots,
        max_num_batched_tokens=VLLM_BATCH_TOKENS,
        block_size=VLLM_BLOCK_TOKENS,
        cpu_kv_cache_gib=1,
        cpu_cores=cores,
        enforce_eager=True,
        extra={"disable_log_stats": not choice.tells_load},
    )
    blank = msgspec.structs.replace(blank_spec("vllm-0"), model=choice.model or MODEL_NAME)
    console.print(f"starting vLLM with {model.name}, half a minute or more ...", style="dim")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(VllmEngine.open(blank, params))
        stack.enter_context(left_alone(choice.cores))
        if listed is not None:
            (spec,) = listed
            _check_model(spec, engine.spec.model)
        else:
            spec = await measured_quickly(engine, engine.spec, choice, console)

        @asynccontextmanager
        async def open_engine(wanted: InstanceSpec, _: Clock) -> AsyncIterator[Engine]:
            yield ReplayedPrompts(engine, wanted)

        async def read_load(_: str) -> ServerLoad | None:
            return engine.load()

        yield Fleet(specs=(spec,), open_engine=open_engine, read_load=read_load, is_real=True)


def _listed(path: Path, count: int) -> Specs:
    specs = load_fleet(str(path))
    if len(specs) != count:
        raise ConfigError(
            f"{path} has {counted(len(specs), 'instance')} for {counted(count, 'engine')}"
        )
    return specs


def _check_model(spec: InstanceSpec, served: str) -> None:
    """Refuse a fleet file of another model: its speeds and its name would both be wrong.

    Raises:
        ConfigError: Says which model is served.
    """
    if spec.model != served:
        raise ConfigError(
            f"the fleet file says that {spec.instance_id} serves {spec.model!r}, but it serves "
            f"{served!r}: measure it with hexflow profile, or correct the file's model"
        )


async def _describe(
    choice: EngineChoice,
    named: dict[str, OpenAIParams],
    listed: Specs | None,
    console: Console,
) -> Specs:
    if listed is not None:
        for spec, params in zip(listed, named.values(), strict=True):
            async with OpenAIEngine.open(spec, params, SystemClock()) as engine:
                _check_model(spec, engine.model)
        return listed
    specs = []
    for name, params in named.items():
        specs.append(await _measured(name, params, choice, console))
    return tuple(specs)


async def _measured(
    instance_id: str, params: OpenAIParams, choice: EngineChoice, console: Console
) -> InstanceSpec:
    """Return a server's description, its speed from a few calls."""
    # A server that hangs would be waited on for five minutes.
    impatient = replace(params, first_token_s=MEASURING_S, idle_s=MEASURING_S, retries=0)
    gpu = "unknown" if choice.engine == "openai" else "CPU"
    blank = blank_spec(instance_id, gpu=gpu)
    async with OpenAIEngine.open(blank, impatient, SystemClock()) as engine:
        spec = msgspec.structs.replace(engine.spec, model=engine.model)
        return await measured_quickly(engine, spec, choice, console)


async def measured_quickly(
    engine: Engine, spec: InstanceSpec, choice: EngineChoice, console: Console
) -> InstanceSpec:
    """Return a description with a speed measured by a few calls.

    Raises:
        ConfigError: The engine does not do them.
    """
    console.print(GUESSING.format(spec.instance_id), style="dim")
    prober = Prober(engine, "guess")
    try:
        await prober.warm_up()
        runs = await prober.run(plan_experiment(spec, quick_scale(spec)).fitted)
    except* GenerationFailed as exc:
        first = exc.exceptions[0]
        raise ConfigError(f"{spec.instance_id} cannot be measured: {first}") from exc
    try:
        fit = await asyncio.to_thread(fit_latency, spec, runs)
    except ValueError as exc:
        raise ConfigError(f"{spec.instance_id} cannot be measured: {exc}") from exc
    measured = msgspec.structs.replace(spec, latency=fit.latency)
    if not choice.is_bounded:
        return measured
    # A burst of other work within these few calls makes batches look dear: a few are let in anyway.
    most = max(knee_calls(measured), min(LEAST_GUESSED_CALLS, measured.max_num_seqs))
    console.print(GUESSED.format(spec.instance_id, most, lone_tokens_per_s(fit.latency)))
    return msgspec.structs.replace(measured, max_num_seqs=most)


def blank_spec(instance_id: str, *, gpu: str = "CPU") -> InstanceSpec:
    """Return a description before anything is known; the server fills most of it in."""
    return InstanceSpec(
        instance_id=instance_id,
        gpu=gpu,
        max_context_tokens=2_048,
        max_num_seqs=64,
        max_batched_tokens=512,
        features=("structured_output",),
        latency=PLACEHOLDER,
    )


def _worker_variables(params: OpenAIParams) -> dict[str, str]:
    found = {
        "WORKER_ENGINE": "openai",
        "WORKER_OPENAI__URL": params.url,
        "WORKER_OPENAI__MODEL": params.model,
    }
    if params.api_key:
        found["WORKER_OPENAI__API_KEY"] = params.api_key
    return found


def count_of(specs: Sequence[InstanceSpec], noun: str) -> str:
    """Return `1 worker`, `2 workers`."""
    return f"{len(specs)} {noun}" + ("" if len(specs) == 1 else "s")
