"""`hexflow version`."""

from importlib.metadata import PackageNotFoundError, version

import typer

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def show() -> None:
    """Print the version."""
    try:
        print(version("hexflow"))
    except PackageNotFoundError:
        print("unknown (hexflow is not installed as a package)")
