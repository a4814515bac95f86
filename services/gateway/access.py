"""Who is asking: API keys from the request, tenants from a file that may change while we run."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import structlog

from services.gateway.metrics import GatewayMetrics
from services.gateway.problems import Problem
from services.gateway.tenants import Tenant, Tenants, parse_tenants
from shared.errors import ConfigError
from shared.ports import Clock

EVERYBODY = "default"
log = structlog.get_logger(__name__)


class Access:
    """The tenants in force.

    Args:
        path: The keys file; None: anybody may call, and says who it is.
        clock: For the time between looks at the file.
        check_s: That time, wall seconds.
        metrics: Counts readings.

    Raises:
        ConfigError: The file cannot be read, or is wrong.
    """

    def __init__(
        self, path: Path | None, clock: Clock, check_s: float, metrics: GatewayMetrics
    ) -> None:
        self._path = path
        self._clock = clock
        self._check_s = check_s
        self._metrics = metrics
        self._mark = _mark(path)
        self.tenants = Tenants(None) if path is None else _read(path)

    def tenant(self, headers: Mapping[str, str], claimed: str | None = None) -> Tenant:
        """Return who is asking.

        Args:
            headers: Lower-case names.
            claimed: The tenant that the request names; believed only where there are no keys.

        Raises:
            Problem: There is no key, or a wrong one (401).
        """
        if self.tenants.is_open:
            return Tenant(name=claimed or EVERYBODY, is_admin=True)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            text = "an API key is needed: Authorization: Bearer hf-..."
            raise Problem(401, text, code="missing_api_key")
        tenant = self.tenants.recognise(key.strip())
        if tenant is None:
            raise Problem(401, "this API key is not known", code="invalid_api_key")
        if claimed is not None and claimed != tenant.name:
            text = f"this API key does not speak for tenant {claimed!r}"
            raise Problem(403, text, code="wrong_tenant", param="tenant")
        return tenant

    def admin(self, headers: Mapping[str, str]) -> Tenant:
        """Return who is asking, if that is an administrator.

        Raises:
            Problem: It is not (401, 403).
        """
        tenant = self.tenant(headers)
        if not tenant.is_admin:
            raise Problem(403, "only an administrator's key may do this", code="not_admin")
        return tenant

    async def follow(self) -> None:
        """Read the file again whenever it has changed; runs until cancelled.

        A file that is wrong changes nothing: the tenants before stay in force.
        """
        while self._path is not None:
            await self._clock.sleep_wall(self._check_s)
            mark = await asyncio.to_thread(_mark, self._path)
            if mark == self._mark:
                continue
            self._mark = mark
            try:
                self.tenants = await asyncio.to_thread(_read, self._path)
            except ConfigError as exc:
                self._metrics.key_reloads.add(result="refused")
                log.error("keys_file_refused", error=str(exc))  # noqa: TRY400 - no trace needed
            else:
                self._metrics.key_reloads.add(result="taken")
                log.info("keys_file_read", tenants=self.tenants.names())


def _mark(path: Path | None) -> tuple[int, int, int] | None:
    """Return what changes when a file does, also when a secret's mount is swapped."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found is not None else None


def _read(path: Path) -> Tenants:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the keys file {path} cannot be read: {exc}") from exc
    return parse_tenants(text)
