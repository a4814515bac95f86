"""The `hexflow` command: its subcommands by name, each loaded only when it is run.

`hexflow --help` must answer at once, so the table below carries each command's one line; the
command's own module, with what it needs (numpy, matplotlib, aiokafka), is imported on use.
"""

import importlib
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup


class Command(NamedTuple):
    """A subcommand: the module whose `app` implements it, and its line in the help."""

    module: str
    help: str


COMMANDS = {
    "demo": Command("demo", "Compare two policies on a live mesh, in under two minutes."),
    "up": Command("up", "Run a whole mesh on this machine."),
    "replay": Command("replay", "Drive a workload through a mesh and report what came back."),
    "simulate": Command("simulate", "Simulate one workload on a fleet under one policy."),
    "compare": Command("compare", "Compare policies on simulated fleets, with a report."),
    "tune": Command("tune", "Decide about α on a recorded window, with the evidence."),
    "adapt": Command("adapt", "Watch the tuner adapt to changing load, live."),
    "generate": Command("generate", "Write a generated Text-to-SQL trace."),
    "import": Command("import_trace", "Make a trace from OpenTelemetry spans or a CSV table."),
    "asyncapi": Command("asyncapi", "Print the message contract for producers in any language."),
    "chat": Command("chat", "Ask a real model one question, through the whole mesh."),
    "profile": Command("profile", "Measure how fast a real engine is."),
    "fidelity": Command("fidelity", "Compare the simulator with a real engine."),
    "model": Command("model", "Fetch the small real model for development and tests."),
    "ask": Command("text2sql.ask", "Ask a question about a database, in plain words."),
    "eval": Command("text2sql.evaluation", "Run a question file through the agent, and score it."),
    "topics": Command("topics", "Create and check the mesh's Kafka topics."),
    "bench": Command("bench", "Measure what the mesh costs, and the simulator."),
    "chaos": Command("chaos.command", "Kill anything, any time, and audit what became of it."),
    "doctor": Command("doctor.command", "Find what is wrong with a mesh, and what to do."),
    "version": Command("version", "Print the version."),
}


class LazyGroup(TyperGroup):
    """A group whose commands are stubs until one of them is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the real command that the arguments name."""
        name, _, rest = super().resolve_command(ctx, args)
        module = importlib.import_module(f"services.cli.{COMMANDS[str(name)].module}")
        command: Any = typer.main.get_command(module.app)
        for one in (command, *getattr(command, "commands", {}).values()):
            one.rich_markup_mode = "markdown"  # fills the terminal's width, whatever it is
        return name, command, rest


def _stub() -> None:
    """Stand for a command in the help."""


def _print_version(*, is_wanted: bool) -> None:
    if is_wanted:
        importlib.import_module("services.cli.version").show()
        raise typer.Exit


app = typer.Typer(
    name="hexflow",
    cls=LazyGroup,
    help="Deadline-aware scheduling of multi-stage LLM workflows on mixed vLLM fleets.",
    epilog="Start with `hexflow demo`. Times are workload seconds: wall seconds x time scale.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda value: _print_version(is_wanted=value),
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Take what comes before the command."""
    del version


for _name, _command in COMMANDS.items():
    app.command(_name, help=_command.help)(_stub)
