"""Who may call, and what each tenant is granted: the keys file, hashed keys, recognising a key.

A key is `hf-<id>-<secret>`; the file holds `<id>:<sha256 of the whole key>`. The id finds the
entry, the hash is compared in constant time. A key has 256 random bits, so a plain hash protects
it: there is nothing to guess that a slow hash would slow down. Reading the file is the caller's
business.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.contracts.messages import Name
from shared.errors import ConfigError

ID_BYTES = 4
SECRET_BYTES = 32
_KEY = re.compile(r"hf-([0-9a-f]{8})-[A-Za-z0-9_-]{20,100}")
_STORED = re.compile(r"([0-9a-f]{8}):([0-9a-f]{64})")
_NOBODY = hashlib.sha256(b"nobody").hexdigest()

Rate = Annotated[float, Meta(gt=0, le=1e6)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant is granted.

    Attributes:
        name: Name in messages, metrics and the dashboard.
        slo_s: Deadline of its queries that name none, mesh seconds; None: the mesh chooses.
        requests_per_s: Longest lasting rate of requests; None: no limit.
        burst: Requests that may come at once after a pause.
        max_open: Most calls open at the same time; None: no limit of its own.
        weight: Its share when the gateway is full, compared with the other tenants'.
        is_admin: Whether it sees every tenant's queries, and may replay dead letters.
    """

    name: str
    slo_s: float | None = None
    requests_per_s: float | None = None
    burst: int = 10
    max_open: int | None = None
    weight: float = 1.0
    is_admin: bool = False


class _TenantEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: tuple[str, ...]
    slo_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    requests_per_s: Rate | None = None
    burst: Count = 10
    max_open: Count | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1_000)] = 1.0
    admin: bool = False


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenants: dict[Name, _TenantEntry]


class Tenants:
    """The tenants of a keys file, or everybody where there is none.

    Args:
        by_id: Key id -> (hash of the key, its tenant); None: no keys are set up.
    """

    def __init__(self, by_id: Mapping[str, tuple[str, Tenant]] | None) -> None:
        self._by_id = by_id

    @property
    def is_open(self) -> bool:
        """Whether anybody may call, because no keys are set up."""
        return self._by_id is None

    def names(self) -> list[str]:
        """Return the tenants' names."""
        return sorted({tenant.name for _, tenant in (self._by_id or {}).values()})

    def recognise(self, key: str) -> Tenant | None:
        """Return the tenant of a key, or None; takes the same time whatever is wrong with it."""
        match = _KEY.fullmatch(key)
        stored, tenant = (self._by_id or {}).get(match[1] if match else "", (_NOBODY, None))
        is_right = hmac.compare_digest(hash_of(key), stored)
        return tenant if is_right else None


def new_key() -> tuple[str, str]:
    """Return a new API key, and what the keys file holds of it."""
    key_id = secrets.token_hex(ID_BYTES)
    key = f"hf-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
    return key, f"{key_id}:{hash_of(key)}"


def hash_of(key: str) -> str:
    """Return the hash that stands for a key at rest."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def parse_tenants(text: str) -> Tenants:
    """Return the tenants of a keys file (TOML).

    Raises:
        ConfigError: It is no TOML, or an entry is wrong; keys are never quoted.
    """
    try:
        raw: dict[str, Any] = tomllib.loads(text)
        found = msgspec.convert(raw, _File)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"the keys file is no TOML: {exc}") from exc
    except msgspec.ValidationError as exc:
        raise ConfigError(f"the keys file: {exc}") from exc
    by_id: dict[str, tuple[str, Tenant]] = {}
    for name, entry in found.tenants.items():
        tenant = Tenant(
            name=name,
            slo_s=entry.slo_s,
            requests_per_s=entry.requests_per_s,
            burst=entry.burst,
            max_open=entry.max_open,
            weight=entry.weight,
            is_admin=entry.admin,
        )
        for place, stored in enumerate(entry.keys):
            match = _STORED.fullmatch(stored)
            if match is None or match[1] in by_id:
                problem = "occurs twice" if match else "is no `<id>:<sha256>`"
                raise ConfigError(
                    f"the keys file: key {place} of {name} {problem}; "
                    "make one with python -m services.gateway.new_key"
                )
            by_id[match[1]] = (match[2], tenant)
    return Tenants(by_id)
