"""`./dev` and the lock files it installs from."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]
DEV = REPO / "dev"
TOOLS = ("python", "ruff", "mypy", "lint-imports", "pytest", "hexflow")
STUB = """#!/bin/sh
echo "{tool} $*" >> "{log}"
echo "{tool} speaks"
exit {code}
"""


class Checkout:
    """A copy of `./dev` whose environment is made of stubs that note how they are called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "calls"
        (root / "requirements").mkdir()
        (root / "requirements" / "dev.txt").write_text("one==1\ntwo==2\n")
        (root / "pyproject.toml").write_text("")
        (root / ".venv" / "bin").mkdir(parents=True)
        shutil.copy(DEV, root)
        for tool in TOOLS:
            self.stub(tool)

    def stub(self, tool: str, code: int = 0) -> None:
        """Make a tool end with an exit code."""
        path = self.root / ".venv" / "bin" / tool
        path.write_text(STUB.format(tool=tool, log=self.log, code=code))
        path.chmod(0o755)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `./dev`."""
        return run_dev(self.root / "dev", *arguments)

    def calls(self) -> list[str]:
        """Return what was called since the last time this was asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Return a checkout whose environment is there but not yet installed into."""
    return Checkout(tmp_path)


def run_dev(dev: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of `./dev` under this Python."""
    return subprocess.run(
        [sys.executable, dev, *arguments], capture_output=True, text=True, check=False
    )


def run_dev_as(setup: str, dev: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `./dev` in an interpreter changed by some statements first."""
    code = f"""
import runpy, sys
{setup}
sys.argv = {[str(dev), *arguments]!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )


def installs(calls: list[str]) -> list[str]:
    """Return which installations are among the calls."""
    return [call.split()[-1] for call in calls if " install " in call]


def test_help_names_every_command():
    """Help is printed without installing anything, and lists the commands there are."""
    done = run_dev(DEV, "help")
    assert done.returncode == 0
    listed = re.findall(r"(?m)^  (\w+)", done.stdout)
    tree = ast.parse(DEV.read_text())
    names = [
        [ast.literal_eval(key) for key in node.value.keys if key]
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "COMMANDS"
    ]
    assert sorted(listed) == sorted([*names[0], "help"])


def test_an_unknown_command_is_refused():
    """A misspelt command fails with the list of commands."""
    done = run_dev(DEV, "tset")
    assert done.returncode == 1
    assert "no command 'tset'" in done.stderr
    assert "usage: ./dev" in done.stderr


def test_old_pythons_can_read_it():
    """It parses on Python 3.7, to say there that 3.11 is needed."""
    ast.parse(DEV.read_text(), feature_version=(3, 7))


def test_an_old_python_is_told_what_is_needed(checkout: Checkout):
    """A Python that is too old, with no newer one around, ends with a clear message."""
    done = run_dev_as("sys.version_info = (3, 9, 1)", checkout.root / "dev", "check")
    assert done.returncode == 1
    assert "hexflow needs Python 3.11 or later" in done.stderr
    assert checkout.calls() == []


def test_a_python_without_venv_is_told_what_to_install(checkout: Checkout):
    """A Python that cannot create environments names the package that is missing."""
    shutil.rmtree(checkout.root / ".venv")
    done = run_dev_as("sys.executable = '/bin/false'", checkout.root / "dev", "check")
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr


def test_it_installs_once_and_again_when_the_lock_changes(checkout: Checkout):
    """The environment is brought in line with the lock file, and left alone while it is."""
    lock = checkout.root / "requirements" / "dev.txt"
    assert checkout.run("setup").returncode == 0
    assert installs(checkout.calls()) == [str(lock), "."]
    assert checkout.run("setup").returncode == 0
    assert checkout.calls() == []
    lock.write_text("one==2\n")
    assert checkout.run("setup").returncode == 0
    assert installs(checkout.calls()) == [str(lock), "."]


def test_a_failed_installation_is_told_and_tried_again(checkout: Checkout):
    """When pip fails its last words are shown, and the next run installs again."""
    python = checkout.root / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *" install "*) echo no such thing; exit 1;; esac\n')
    done = checkout.run("setup")
    assert done.returncode == 1
    assert "pip failed" in done.stderr
    assert "no such thing" in done.stderr
    checkout.stub("python")
    assert checkout.run("setup").returncode == 0
    assert len(installs(checkout.calls())) == 2


def test_every_step_runs_and_pytest_has_the_last_word(checkout: Checkout):
    """A failing check fails the run, but neither hides the others nor pytest's closing line."""
    checkout.run("setup")
    checkout.calls()
    checkout.stub("ruff", code=1)
    done = checkout.run("test", "-k", "fast")
    assert done.returncode == 1
    tools = [call.split()[0] for call in checkout.calls()]
    assert tools == ["ruff", "ruff", "mypy", "lint-imports", "pytest"]
    assert "FAILED: ruff check, ruff format" in done.stdout
    assert done.stdout.endswith("== pytest -k fast\npytest speaks\n")


def test_a_failing_test_fails_the_run(checkout: Checkout):
    """Pytest's own exit code is the run's."""
    checkout.stub("pytest", code=5)
    assert checkout.run("test").returncode == 5
    assert checkout.run("check").returncode == 0


def test_hexflow_gets_its_arguments_and_a_clean_output(checkout: Checkout):
    """What `run` prints is hexflow's alone, even when it has to install first."""
    done = checkout.run("run", "--", "topics", "--json")
    assert done.returncode == 0
    assert done.stdout == "hexflow speaks\n"
    assert "installing" in done.stderr
    assert checkout.calls()[-1] == "hexflow topics --json"
    checkout.run("demo", "--seed", "1")
    assert checkout.calls() == ["hexflow demo --seed 1"]


def pins(name: str) -> dict[str, str]:
    """Return the packages and versions that a lock file pins."""
    text = (REPO / "requirements" / f"{name}.txt").read_text()
    found = re.findall(r"(?m)^([a-z0-9-]+)(?:\[[^]]*\])?==([^\s;]+)", text)
    assert found
    return dict(found)


@pytest.mark.parametrize("name", ["base", "dev"])
def test_lock_files_name_hashes_and_no_hosts(name: str):
    """Every pin has a hash, and the file works with any package index."""
    text = (REPO / "requirements" / f"{name}.txt").read_text()
    assert "://" not in text
    entries = re.split(r"(?m)^(?=[a-z0-9-]+(?:\[[^]]*\])?==)", text)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("name", ["base", "dev"])
def test_lock_files_fit_the_project(name: str):
    """What pyproject.toml asks for is pinned within its bounds; `./dev lock` keeps it so."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    wanted = list(project["project"]["dependencies"])
    if name == "dev":
        wanted += project["project"]["optional-dependencies"]["dev"]
        wanted += project["build-system"]["requires"]
    pinned = pins(name)
    for requirement in map(Requirement, wanted):
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert key in pinned, f"{key} is not locked; run ./dev lock"
        assert requirement.specifier.contains(pinned[key], prereleases=True)


def test_tests_run_on_what_is_shipped():
    """Both lock files agree on every package that they share."""
    base, dev = pins("base"), pins("dev")
    assert {name: dev.get(name) for name in base} == base
