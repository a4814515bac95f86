"""An embedded mesh with a gateway, for tests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from services.cli.embedded import EmbeddedMesh, EmbeddedParams, open_embedded
from services.gateway.gateway import Gateway
from services.gateway.params import GatewayParams
from shared.domain.instance import InstanceSpec, LatencyModel

PATIENCE_S = 60.0


def quick_fleet(num: int = 2, **changes: Any) -> tuple[InstanceSpec, ...]:
    """Return instances that take about a millisecond a token."""
    fields: dict[str, Any] = {
        "gpu": "none",
        "max_num_seqs": 64,
        "kv_tokens": 1_000_000,
        "latency": LatencyModel(prefill_s_per_token=1e-7, weights_s=1e-3),
        **changes,
    }
    return tuple(InstanceSpec(instance_id=f"quick-{index}", **fields) for index in range(num))


@asynccontextmanager
async def gateway_mesh(
    fleet: tuple[InstanceSpec, ...] | None = None, *, time_scale: float = 1.0, **params: Any
) -> AsyncIterator[EmbeddedMesh]:
    """Run a mesh with a gateway; `params` are fields of `GatewayParams`."""
    async with open_embedded(
        EmbeddedParams(
            fleet=fleet if fleet is not None else quick_fleet(),
            tunes=False,
            time_scale=time_scale,
            drain_s=5.0,
            gateway=GatewayParams(**params),
        )
    ) as mesh:
        yield mesh


def gateway_of(mesh: EmbeddedMesh) -> Gateway:
    """Return the mesh's gateway."""
    return next(iter(mesh.gateways.values()))


async def until(condition: Callable[[], bool], what: str) -> None:
    """Return when a condition holds.

    Raises:
        AssertionError: It did not within a minute.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(what) from None
