"""How to reach an OpenAI-compatible server, and how long to wait for it."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.errors import ConfigError

MIB = 1024 * 1024
ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/embeddings", "/models")


@dataclass(frozen=True, kw_only=True)
class OpenAIParams:
    """One server. Durations are wall seconds.

    Raises:
        ConfigError: The address is no http or https URL, holds credentials, or names one path.
    """

    url: str
    """`http://host:port`, with or without `/v1`."""
    model: str = ""
    """Its name for the instance's base model; empty: the only one it serves, or the same name."""
    api_key: str | None = None
    """Sent as bearer token."""
    connect_s: float = 5.0
    """Longest time to connect."""
    first_token_s: float = 300.0
    """Longest time from the request to its first token."""
    idle_s: float = 60.0
    """Longest silence after that."""
    total_s: float = 3_600.0
    """Longest time for a call."""
    retries: int = 2
    """Further tries of a request that the server could not take now (no connection, 429, 5xx)."""
    retry_pause_s: float = 0.25
    """Pause before the first of them, doubled before each further one."""
    longest_retry_pause_s: float = 5.0
    """Longest of these pauses, whatever `Retry-After` says."""
    failure_threshold: int = 5
    """Failures in a row after which the server is left alone for a while."""
    failure_pause_s: float = 1.0
    """How long, at first; doubled while it goes on failing."""
    longest_failure_pause_s: float = 5.0
    """Longest of these pauses."""
    startup_s: float = 60.0
    """How long to wait at the start for a server that does not answer yet."""
    load_s: float = 1.0
    """Time between two looks at its metrics."""
    sends_priority: bool = False
    """Whether it is told each call's priority: vLLM refuses that without priority scheduling."""
    max_line_bytes: int = 8 * MIB
    """Longest event that is read."""
    max_answer_bytes: int = 64 * MIB
    """Largest answer that is read."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _ = parts.port  # read, because only that checks it
        except ValueError as exc:
            raise ConfigError(
                f"{self.url!r} is no server's address ({exc}); give http://HOST:PORT"
            ) from exc
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is no server's address; give http://HOST:PORT")
        for path in ENDPOINTS:
            if parts.path.rstrip("/").endswith(path):
                base = self.url[: self.url.index(path)].removesuffix("/v1")
                raise ConfigError(f"{self.url!r} is one path of a server; give {base}")
        if parts.username or parts.password:
            raise ConfigError("the server's address holds credentials; give the key as a setting")

    def endpoint(self, path: str) -> str:
        """Return the address of a path such as `/v1/models` or `/metrics`."""
        base = self.url.rstrip("/")
        return base.removesuffix("/v1") + path
