"""The official schema of compose files, from the module that Docker Compose itself uses."""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.servers import MissingServerError, do_without

MODULE = "github.com/compose-spec/compose-go/v2@v2.16.2"


@cache
def compose_schema() -> dict[str, Any]:
    """Return the schema; without Go to fetch it the test is not run, or fails where it must."""
    if shutil.which("go") is None:
        do_without(MissingServerError("the compose schema: install Go to fetch it"))
    done = subprocess.run(
        ["go", "mod", "download", "-json", MODULE], capture_output=True, text=True, check=False
    )
    if done.returncode:
        do_without(MissingServerError(f"the compose schema: {done.stdout[-500:]}{done.stderr}"))
    folder = Path(json.loads(done.stdout)["Dir"])
    found: dict[str, Any] = json.loads((folder / "schema" / "compose-spec.json").read_text())
    return found
