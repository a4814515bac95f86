"""`hexflow bench`: what the mesh itself costs."""

import typer

from services.cli import bench_mesh

app = typer.Typer(
    help="Measure what the mesh itself costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def bench() -> None:
    """Measure what the mesh itself costs."""


app.command("mesh")(bench_mesh.command)
