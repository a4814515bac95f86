"""Runs the tests of `tests/vllm` in the environment that has vLLM (`hexflow model --vllm`)."""

import os
import subprocess
from pathlib import Path

import pytest

from shared.adapters.local_kafka import default_cache_dir
from shared.adapters.vllm_environment import prepare, variables, vllm_python
from shared.errors import ConfigError
from tests.support.servers import NOT_RUN, MissingServerError, do_without

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.name for path in (ROOT / "tests/vllm").glob("test_*.py"))
LIMIT_S = 1_500
REQUIRE = "HEXFLOW_REQUIRE_VLLM"
"""Apart from `HEXFLOW_REQUIRE_SERVERS`: preparing vLLM takes longer than all other tests."""
HOW = "vLLM for CPUs is not prepared: hexflow model --vllm (6 GB, about ten minutes)"


@pytest.fixture(scope="session")
def python_with_vllm() -> Path:
    """Return the Python that has vLLM; prepared first where it is required."""
    cache_dir = default_cache_dir(os.environ)
    if vllm_python(cache_dir) is None and os.environ.get(REQUIRE) != "1":
        pytest.skip(f"{NOT_RUN}{HOW}; {REQUIRE}=1 prepares and runs it")
    try:
        python, _ = prepare(cache_dir)
    except ConfigError as exc:
        do_without(MissingServerError(str(exc)))
    return python


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 1_800)
@pytest.mark.parametrize("name", FILES)
def test_real_vllm(name: str, python_with_vllm: Path) -> None:
    """Every test of the file passes on real vLLM."""
    done = subprocess.run(
        [
            *(str(python_with_vllm), "-m", "pytest", f"tests/vllm/{name}", "-q"),
            *("-p", "no:cacheprovider", "-o", "filterwarnings=default", "--color=no"),
        ],
        cwd=ROOT,
        env={**os.environ, **variables()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
    assert " passed" in done.stdout
