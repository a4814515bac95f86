"""checkov, a public policy checker, in an environment of its own: it pins many packages.

The environment (300 MB, about a minute) is made once, in the cache folder, where a missing server
is a failure; elsewhere it is used if it is there.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.support.servers import MissingServerError, cache_dir, is_required

VERSION = "3.3.30"
INSTALL_WITHIN_S = 300.0
CHECK_WITHIN_S = 120.0


class Finding(NamedTuple):
    """What a check says of a resource.

    Attributes:
        check: Its id.
        name: What should be the case.
        resource: Which.
    """

    check: str
    name: str
    resource: str


def checkov_program() -> Path:
    """Return the program; makes its environment where one is required.

    Raises:
        MissingServerError: It is not there, or cannot be installed; says how to get it.
    """
    folder = cache_dir() / f"checkov-{VERSION}"
    program = folder.resolve() / "bin" / "checkov"
    if program.exists():
        return program
    if not is_required():
        raise MissingServerError(
            f"checkov: HEXFLOW_REQUIRE_SERVERS=1 installs it, or: python3 -m venv {folder} && "
            f"{folder}/bin/pip install checkov=={VERSION}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="checkov-") as staging:
        made = Path(staging) / folder.name
        pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        commands = (
            [sys.executable, "-m", "venv", "--copies", str(made)],
            [str(made / "bin" / "python"), *pip, f"checkov=={VERSION}"],
        )
        for command in commands:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=INSTALL_WITHIN_S
            )
            if done.returncode:
                raise MissingServerError(f"checkov: installing it failed: {done.stderr[-500:]}")
        shutil.move(made, folder)
    # The script names the interpreter where it was made.
    text = program.read_text()
    program.write_text(text.replace(str(made), str(folder.resolve()), 1))
    return program


def findings(program: Path, manifests: str, folder: Path) -> list[Finding]:
    """Return what fails in Kubernetes manifests.

    Args:
        program: checkov.
        manifests: YAML documents.
        folder: For the file that it reads.
    """
    file = folder / "manifests.yaml"
    file.write_text(manifests)
    done = subprocess.run(
        [
            *(str(program), "--framework", "kubernetes", "--file", str(file)),
            *("--output", "json", "--quiet", "--skip-download"),
        ],
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin", "LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=CHECK_WITHIN_S,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0, done.stdout[-2_000:]
    assert report["summary"]["passed"] > 0
    return [
        Finding(one["check_id"], one["check_name"], one["resource"])
        for one in report["results"]["failed_checks"]
    ]
