"""`hexflow profile`: how fast an instance is, measured."""

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.cli import plots
from services.cli.console import check_writable, print_json, stderr_console, stdout_console
from services.cli.engine_options import (
    ModelOption,
    OpenAIOption,
    RealEngineOption,
    asked_for,
    real_choice_of,
)
from services.cli.interrupts import run_until_stopped
from services.cli.options import JsonOption, VerboseOption, configure_logs
from services.cli.profiling import (
    Profile,
    profile_engine,
    profile_figure,
    profile_json,
    profile_table,
)
from services.cli.progress import JobProgress
from services.cli.real_engines import EngineChoice, Fleet, open_real
from shared.adapters.clock import SystemClock
from shared.errors import ConfigError
from shared.simulation.fleets import dump_fleet

BOUND_BY_NOISE = 0.05
BADLY = (
    "The model explains it badly: something else ran on these cores meanwhile, or the engine does "
    "not behave like the model. Measure again on a quiet machine."
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


async def profile_fleet(choice: EngineChoice, seed: int, console: Console) -> list[Profile]:
    """Return the profile of each of the engines chosen, one after the other.

    Raises:
        ConfigError: An engine cannot be had, or does not do what the experiment asks.
        TransientError: A server does not answer.
    """
    whole = msgspec.structs.replace(choice, is_bounded=False)
    async with open_real(whole, console) as engines:
        return [
            await _profile(engines, index, seed, console) for index in range(len(engines.specs))
        ]


async def _profile(engines: Fleet, index: int, seed: int, console: Console) -> Profile:
    spec = engines.specs[index]
    async with engines.open_engine(spec, SystemClock()) as engine:
        return await profile_engine(engine, spec, JobProgress(console), seed)


def write_profile(profiles: list[Profile], path: Path) -> None:
    """Write a fleet file with the profiled instances.

    Raises:
        ConfigError: It cannot be written.
    """
    head = "# Measured by hexflow profile; median errors of the model:\n"
    notes = "".join(
        f"#   {one.spec.instance_id}: first token {one.fit.errors.ttft_median:.1%}, "
        f"whole call {one.fit.errors.latency_median:.1%}, "
        f"on calls not fitted {one.held_out.latency_median:.1%}\n"
        + (f"#   {BADLY}\n" if explains_badly(one) else "")
        for one in profiles
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + notes + dump_fleet([one.spec for one in profiles]))
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def explains_badly(profile: Profile) -> bool:
    """Return whether the model is too far off what was measured to be relied on."""
    errors = profile.fit.errors
    return max(errors.latency_median, errors.ttft_median) > BOUND_BY_NOISE


@app.command()
def command(
    engine: RealEngineOption = None,
    openai: OpenAIOption = None,
    model: ModelOption = "",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The fleet file to write; a plot goes beside it.")
    ] = Path("out/profile.toml"),
    seed: Annotated[int, typer.Option(min=0, help="Of the mixed runs.")] = 0,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure how fast an engine is, and write it down as a fleet file.

    A designed experiment of a few minutes (prompt lengths × batch sizes × cached prefixes, and
    random calls at random times) is run through the engine port; the simulator's latency model is
    fitted to it. Nothing else should use the engine or its cores meanwhile.
    """
    configure_logs(verbose=verbose)
    choice = real_choice_of(
        engine, openai, "a simulated engine's speed is what its fleet file says", model=model
    )
    check_writable(out)  # better told now than after minutes
    console = stderr_console()
    profiles = run_until_stopped(lambda _: profile_fleet(choice, seed, console), is_graceful=False)
    write_profile(profiles, out)
    pictures = [
        plots.save(profile_figure(one), out.parent, f"{out.stem}-{one.spec.instance_id}.png")
        for one in profiles
    ]
    if json:
        files = {"fleet": os.fspath(out), "plots": [os.fspath(path) for path in pictures]}
        print_json({"profiles": [profile_json(one) for one in profiles], "files": files})
        return
    shown = stdout_console()
    for one, picture in zip(profiles, pictures, strict=True):
        shown.print(profile_table(one))
        if explains_badly(one):
            shown.print(BADLY, style="yellow")
        shown.print(f"Plot: [bold]{picture}[/bold]", soft_wrap=True)
    shown.print(
        f"Fleet file: [bold]{out}[/bold] (hexflow up {asked_for(choice)} --fleet {out})",
        soft_wrap=True,
    )
