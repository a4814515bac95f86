"""`hexflow version`."""

from importlib.metadata import PackageNotFoundError, version

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def installed_version() -> str:
    """Return the version of the installed distribution; `0` when run from a bare tree."""
    try:
        return version("hexflow")
    except PackageNotFoundError:
        return "0"


@app.command()
def show() -> None:
    """Print the version."""
    print(installed_version())
