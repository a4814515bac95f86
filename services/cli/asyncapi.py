"""`hexflow asyncapi`: the message contract as a document for producers in any language."""

import json
import sys

import typer

from services.cli.version import installed_version
from shared.contracts.asyncapi import document

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def show() -> None:
    """Print the AsyncAPI document of the mesh's messages and topics."""
    sys.stdout.write(json.dumps(document(installed_version()), indent=2) + "\n")
