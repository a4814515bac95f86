"""llama.cpp's own OpenAI-compatible server, from the package `xllamacpp`, as a child process.

`LlamaCppServer` starts `python -m shared.adapters.llamacpp_server`, which serves one GGUF model, on
loopback unless told otherwise. The server never outlives the process that started it, however that
ends (`local_process.py`), and can be started again at the same address.
"""

import asyncio
import importlib.util
import os
import signal
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import structlog

from shared.adapters.local_process import LOOPBACK, LocalProcess, free_port
from shared.errors import ConfigError

START_S = 120.0
STOP_S = 5.0
CHECK_S = 0.25
PROBE_S = 2.0
INSTALL = "llama.cpp's server is missing: pip install xllamacpp"
log = structlog.get_logger(__name__)


class LlamaCppParams(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve, and how.

    Attributes:
        model_path: GGUF file.
        model_name: What the model is called.
        host: Address it listens on; anything but loopback is for containers of its own: it asks
            nobody who they are.
        port: Its port; 0: a free one.
        num_slots: Calls batched together.
        slot_tokens: Longest prompt plus output of one of them, tokens.
        batch_tokens: Token budget of an iteration.
        num_threads: Threads that compute; 0: one per core it may use, less one for the mesh: they
            wait for each other at every step, so one that has to share its core slows all down.
        cores: Cores it may use; empty: all.
    """

    model_path: str
    model_name: str
    host: str = LOOPBACK
    port: int = 0
    num_slots: int = 4
    slot_tokens: int = 2_048
    batch_tokens: int = 512
    num_threads: int = 0
    cores: tuple[int, ...] = ()


class LlamaCppServer:
    """One server that can be started, stopped, killed and started again.

    Args:
        params: What to serve.
        log_path: Where it writes what it says.

    Raises:
        ConfigError: The package, or the model's file, is missing.
    """

    def __init__(self, params: LlamaCppParams, log_path: Path) -> None:
        if importlib.util.find_spec("xllamacpp") is None:
            raise ConfigError(INSTALL)
        if not Path(params.model_path).is_file():
            raise ConfigError(f"there is no model at {params.model_path}")
        self.params = msgspec.structs.replace(params, port=params.port or free_port())
        self._process = LocalProcess(
            "llama.cpp",
            [sys.executable, "-m", __name__, msgspec.json.encode(self.params).decode()],
            log_path,
        )

    @property
    def url(self) -> str:
        """Where it listens; the same over restarts."""
        return f"http://{LOOPBACK}:{self.params.port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid

    def start(self) -> None:
        """Start it, and return when it answers; blocks.

        Raises:
            ConfigError: It did not start; with the end of its log.
        """
        self._process.start()
        self._process.wait_until(self._answers, START_S)

    def stop(self) -> None:
        """End it; blocks."""
        self._process.stop(STOP_S)

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would; blocks."""
        self._process.kill()

    async def keep_running(self) -> None:
        """Start it again whenever it has ended; runs until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._process.is_running:
                continue
            tail = " · ".join(self._process.log_tail(3).splitlines())
            log.warning("engine_server_restarted", url=self.url, log=tail)
            try:
                await asyncio.to_thread(self.start)
            except ConfigError as exc:
                log.error("engine_server_not_started", error=str(exc))  # noqa: TRY400 - no bug

    def _answers(self) -> bool:
        # Loopback and a path of our own; an answer other than 200 raises an OSError.
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=PROBE_S) as answer:  # noqa: S310
            return bool(answer.read())


def serve(params: LlamaCppParams) -> None:
    """Serve until SIGTERM or SIGINT."""
    if params.cores:
        os.sched_setaffinity(0, params.cores)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = _native_server(params)  # threads of its own, for as long as it is referenced
    stop.wait()
    del server
    os._exit(0)  # its worker threads would be joined for seconds


def _native_server(params: LlamaCppParams) -> Any:
    native: Any = importlib.import_module("xllamacpp")
    options = native.CommonParams()
    options.model.path = params.model_path
    options.model_alias = {params.model_name}
    options.hostnames = [params.host]
    options.port = params.port
    options.n_parallel = params.num_slots
    options.n_ctx = params.num_slots * params.slot_tokens
    options.n_batch = options.n_ubatch = params.batch_tokens
    options.cache_ram_mib = 0  # only what lies in a slot counts as cached
    options.endpoint_metrics = True
    options.ui = False
    num_threads = params.num_threads or max(1, len(os.sched_getaffinity(0)) - 1)
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = num_threads
    return native.Server(options)


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1].encode(), type=LlamaCppParams))
