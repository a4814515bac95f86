"""The options by which a command's engines are chosen, and what they choose."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer

from services.cli.real_engines import EngineChoice, EngineName
from services.cli.under_vllm import has_vllm, run_there
from shared.adapters.vllm_params import QUIET
from shared.domain.near_names import did_you_mean
from shared.errors import ConfigError
from shared.simulation.fleets import BUILTIN_GPUS

SIMULATED = "simulated"
DEFAULT_REAL = "llamacpp"
NAMES = (SIMULATED, *get_args(EngineName))
NOTHING_TO_SAY = "a simulated engine has nothing to say: --engine llamacpp or vllm, or --openai URL"
EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="simulated (the default); llamacpp or vllm: a real small model on this machine's CPU.",
    ),
]
RealEngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="llamacpp (the default) or vllm: a real small model on this machine's CPU.",
    ),
]
OpenAIOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="A server with an OpenAI-compatible API that runs already (vLLM, SGLang, llama.cpp); "
        "may be given several times. Its key: OPENAI_API_KEY.",
    ),
]
OneOpenAIOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Measure a server with an OpenAI-compatible API that runs already. Its key: "
        "OPENAI_API_KEY.",
    ),
]
ModelOption = Annotated[
    str, typer.Option(metavar="NAME", help="Which model, where --openai's servers have several.")
]
CoreOption = Annotated[
    int | None, typer.Option(min=0, help="Hold the engine on this core; default: the last.")
]


def choice_of(
    engine: str | None,
    openai: Sequence[str] | None,
    *,
    fleet: str | None = None,
    model: str = "",
) -> EngineChoice | None:
    """Return the engines that a command's options choose; None: simulated ones.

    Args:
        engine: As `--engine` says.
        openai: Servers that run already.
        fleet: File with the speeds of real ones.
        model: Which model of the servers; empty: the only one they have.

    Raises:
        ConfigError: The options contradict each other, or there is no such engine.
    """
    path = Path(fleet) if fleet else None
    if fleet in BUILTIN_GPUS and (openai or engine not in (None, SIMULATED)):
        raise ConfigError(
            f"--fleet {fleet} is made of simulated engines; with real ones --fleet names the file "
            "that hexflow profile wrote of them"
        )
    if openai and engine not in (None, "openai"):
        raise ConfigError(f"--openai names servers, --engine {engine} starts one: use one of them")
    if model and not openai:
        raise ConfigError(f"--model {model} chooses a model of the servers that --openai names")
    if openai:
        return EngineChoice(
            engine="openai", urls=tuple(openai), fleet=path, api_key=_api_key(), model=model
        )
    if engine in (None, SIMULATED):
        return None
    if engine == "llamacpp":
        return EngineChoice(engine="llamacpp", fleet=path)
    if engine == "vllm":
        os.environ.update({**QUIET, **os.environ})  # the screen is the command's
        if not has_vllm():
            raise typer.Exit(run_there(lambda text: print(f"{text} ...", file=sys.stderr)))
        return EngineChoice(engine="vllm", fleet=path)
    if engine == "openai":
        raise ConfigError("which servers? --openai URL names one")
    hint = did_you_mean(engine, NAMES) or ";"
    raise ConfigError(
        f"no engine {engine!r}{hint} there are simulated, llamacpp and vllm, and --openai URL for "
        "a server that runs already"
    )


def real_choice_of(
    engine: str | None, openai: Sequence[str] | None, why: str, *, model: str = ""
) -> EngineChoice:
    """Return the engines of a command that has no use for simulated ones.

    Args:
        engine: As `--engine` says; None: not given, so llama.cpp where no server is named either.
        openai: Servers that run already.
        why: What is said to a simulated engine.
        model: Which model of the servers; empty: the only one they have.

    Raises:
        ConfigError: The options contradict each other, or choose a simulated engine.
    """
    choice = choice_of(engine or (None if openai else DEFAULT_REAL), openai, model=model)
    if choice is None:
        raise ConfigError(why)
    return choice


def asked_for(choice: EngineChoice) -> str:
    """Return the options that choose these engines."""
    if choice.urls:
        named = [f"--openai {url}" for url in choice.urls]
        return " ".join([*named, *([f"--model {choice.model}"] if choice.model else [])])
    return f"--engine {choice.engine}"


def on_one_core(
    engine: str | None,
    openai: Sequence[str] | None,
    core: int | None,
    why: str,
    *,
    model: str = "",
) -> EngineChoice:
    """Return the one engine to measure; if it is started here, held on a core.

    Args:
        engine: As `--engine` says; None: not given.
        openai: A server that runs already.
        core: The core; None: the last.
        why: What is said to a simulated engine.
        model: Which model of the server; empty: the only one it has.

    Raises:
        ConfigError: The options contradict each other.
    """
    if openai and len(openai) > 1:
        raise ConfigError(f"--openai names {len(openai)} servers: one at a time is measured")
    if openai and core is not None:
        raise ConfigError("--core holds an engine that is started here; it cannot move --openai's")
    choice = real_choice_of(engine, openai, why, model=model)
    if choice.engine == "openai":
        return choice
    usable = sorted(os.sched_getaffinity(0))
    if core is not None and core not in usable:
        raise ConfigError(f"--core {core}: this command may use {', '.join(map(str, usable))}")
    cores = (usable[-1] if core is None else core,)
    return msgspec.structs.replace(choice, cores=cores, num_threads=1)


def _api_key() -> str | None:
    """Return the key for the servers: a command line would show it to everybody."""
    return os.environ.get("OPENAI_API_KEY") or None
