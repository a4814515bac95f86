"""Runs this very command in the environment that has vLLM, where this one has not.

The command becomes a child in a session of its own, so that Ctrl-C in the terminal reaches its
engine only through it; it never outlives this process, however that ends.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from shared.adapters.engine_guard import Guard
from shared.adapters.local_kafka import default_cache_dir
from shared.adapters.vllm_environment import prepare, variables


def has_vllm() -> bool:
    """Return whether vLLM can be imported here."""
    return importlib.util.find_spec("vllm") is not None


def run_there(say: Callable[[str], None]) -> int:
    """Run this process's command line where vLLM is, and return its exit code.

    Args:
        say: Told of what takes long: the first time vLLM is installed.

    Raises:
        ConfigError: vLLM cannot be installed.
    """
    python, _ = prepare(default_cache_dir(os.environ), say)
    guard = Guard()
    child = subprocess.Popen(  # noqa: S603 - our own command line
        [str(python), "-m", "services.cli", *sys.argv[1:]],
        env={**os.environ, **variables()},
        start_new_session=True,
    )

    def forward(number: int, _: object) -> None:
        child.send_signal(number)

    before = {sig: signal.signal(sig, forward) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        return child.wait()
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
        guard.dismiss()
