"""A server that this process starts, stops, kills and starts again.

The child is known by its pid alone and runs in a session of its own, so Ctrl-C in a terminal
reaches it only through `stop`. It never outlives its parent: a guard, a small shell that holds
the read end of a pipe, sees the pipe close when the parent ends in whatever way, SIGKILL
included, and then ends the child. (`PR_SET_PDEATHSIG` would do so on Linux only, and fires when
the *thread* that started the child ends.) A process forked from the parent without `exec` keeps
the pipe open and so keeps the child alive until it ends too.

All calls block; from a coroutine use `asyncio.to_thread`.
"""

import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.errors import ConfigError

LOOPBACK = "127.0.0.1"

# Below the ranges from which Linux and macOS take the local port of an outgoing connection. A
# probe that dials a closed port inside that range can be given the very port it dials: TCP then
# connects the socket to itself, the probe "succeeds" and the server can no longer bind.
_FIRST_PORT = 20_000
_LAST_PORT = 32_000

_GUARD = """
read -r child || exit 0
read -r _
kill -TERM "$child" 2>/dev/null || exit 0
tries=0
while [ "$tries" -lt 25 ] && kill -0 "$child" 2>/dev/null; do
  sleep 0.2
  tries=$((tries + 1))
done
kill -KILL "$child" 2>/dev/null
"""


class LocalProcess:
    """One child process, restartable, with its output appended to a file.

    Args:
        name: What the server is called in error messages.
        command: Program and arguments.
        log_path: Where its standard output and error go.
        environ: Its whole environment; None inherits this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._command = list(command)
        self._environ = environ
        self._child: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        # One thread may stop it while another asks whether it runs.
        self._reaping = threading.Lock()

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable of the child; it counts from its next start on.

        Raises:
            ValueError: The child inherits this process's environment.
        """
        if self._environ is None:
            raise ValueError(f"{self.name} has no environment of its own")
        self._environ = {**self._environ, name: value}

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        child = self._child
        return child.pid if child is not None and self.is_running else None

    @property
    def is_running(self) -> bool:
        """Whether the child has been started and has not ended."""
        child = self._child
        if child is None:
            return False
        if child.poll() is None:
            return True
        self._reap(child)
        return False

    def start(self) -> None:
        """Start the child; does nothing while it runs.

        Raises:
            ConfigError: The program cannot be executed.
        """
        if self.is_running:
            return
        with self._reaping:
            if self._child is None:
                self._spawn()

    def _spawn(self) -> None:
        guard = subprocess.Popen(  # noqa: S603 - a constant script
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guard = guard
        try:
            with self.log_path.open("ab") as log:
                self._child = subprocess.Popen(  # noqa: S603 - the caller's own command
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environ,
                    start_new_session=True,
                )
        except OSError as exc:
            self._release_guard()
            raise ConfigError(f"{self.name} cannot be started: {exc}") from exc
        if guard.stdin is not None:
            guard.stdin.write(b"%d\n" % self._child.pid)
            guard.stdin.flush()

    def stop(self, grace_s: float = 15.0) -> None:
        """End the child with SIGTERM, and with SIGKILL when that takes longer than `grace_s`."""
        child = self._child
        if child is not None and self.is_running:
            child.terminate()
            try:
                child.wait(grace_s)
            except subprocess.TimeoutExpired:
                child.kill()
        self._reap(child)

    def kill(self) -> None:
        """End the child with SIGKILL, as a crash would."""
        child = self._child
        if child is not None and self.is_running:
            child.kill()
        self._reap(child)

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll until the server answers; stop it when it never does.

        Args:
            is_ready: Whether the server answers; an `OSError` counts as no.
            timeout_s: Seconds after which to give up, > 0.

        Raises:
            ConfigError: It ended, or did not answer in time; with the end of its log.
        """
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            if not self.is_running:
                raise ConfigError(f"{self.name} ended while starting:\n{self.log_tail()}")
            try:
                if is_ready():
                    return
            except OSError:
                pass
            time.sleep(0.05)
        self.stop()
        raise ConfigError(
            f"{self.name} did not answer within {timeout_s:g} s:\n{self.log_tail()}",
        )

    def log_tail(self, num_lines: int = 15) -> str:
        """Return the last lines of its output."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        return "\n".join([*lines[-num_lines:], f"(whole log: {self.log_path})"])

    def _reap(self, child: subprocess.Popen[bytes] | None) -> None:
        """Wait for a child, unless another thread did, or has even started the next one."""
        with self._reaping:
            if child is None or self._child is not child:
                return
            # No guard may outlive its child: it would signal a pid that was given away again.
            self._release_guard()
            child.wait()
            self._child = None

    def _release_guard(self) -> None:
        if self._guard is None:
            return
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard = None


def free_port() -> int:
    """Return a loopback TCP port that nobody listens on, chosen at random.

    Raises:
        ConfigError: A hundred ports in a row are taken.
    """
    for _ in range(100):
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port between {_FIRST_PORT} and {_LAST_PORT} on {LOOPBACK}")


def connect(host: str, port: int, timeout_s: float = 2.0) -> socket.socket:
    """Open a TCP connection to a server that may not be there yet.

    Raises:
        OSError: Nothing listens there, or the socket was connected to itself.
    """
    sock = socket.create_connection((host, port), timeout_s)
    if is_connected_to_itself(sock):
        sock.close()
        raise ConnectionRefusedError(f"{host}:{port} is this very socket")
    return sock


def is_connected_to_itself(sock: socket.socket) -> bool:
    """Return whether both ends of a connection are one socket, which TCP allows."""
    return bool(sock.getsockname() == sock.getpeername())
