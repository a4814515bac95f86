"""The official JSON Schema of AsyncAPI 3.0, from the npm package `@asyncapi/specs`."""

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.support.servers import MissingServerError, cache_dir

PACKAGE = "@asyncapi/specs"
VERSION = "6.11.1"
MEMBER = "package/schemas/3.0.0.json"


def asyncapi_schema() -> dict[str, Any]:
    """Return the schema, fetched once into the cache folder.

    Raises:
        MissingServerError: npm is not there or cannot fetch the package.
    """
    kept = cache_dir() / f"asyncapi-specs-{VERSION}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(_fetch(kept.parent)))
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def _fetch(folder: Path) -> dict[str, Any]:
    npm = shutil.which("npm")
    if npm is None:
        raise MissingServerError(_how_to_get_it("npm is not installed"))
    done = subprocess.run(
        [npm, "pack", f"{PACKAGE}@{VERSION}", "--silent"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode != 0:
        raise MissingServerError(_how_to_get_it(done.stderr.strip()[-300:]))
    archive = folder / done.stdout.strip().splitlines()[-1]
    with tarfile.open(archive) as tar:
        member = tar.extractfile(MEMBER)
        assert member is not None
        found: dict[str, Any] = json.load(member)
    archive.unlink()
    return found


def _how_to_get_it(cause: str) -> str:
    return f"no AsyncAPI schema: {cause}\nTo get it: install Node.js with npm (Debian: npm)"
