"""`hexflow bench`: what the mesh costs, and how fast it is simulated."""

import typer

from services.cli import (
    bench_admission,
    bench_gateway,
    bench_mesh,
    bench_overload,
    bench_simulator,
    bench_stationary,
    bench_tuner,
)

app = typer.Typer(
    help="Measure what the mesh costs, and the simulator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def bench() -> None:
    """Measure what the mesh costs, and the simulator."""


app.command("mesh")(bench_mesh.command)
app.command("gateway")(bench_gateway.command)
app.command("simulator")(bench_simulator.command)
app.command("tuner")(bench_tuner.command)
app.command("overload")(bench_overload.command)
app.command("stationary")(bench_stationary.command)
app.command("admission")(bench_admission.command)
