"""How a mesh in this process ends: in order, or at once."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from services.cli.embedded import EmbeddedParams, open_embedded
from services.gateway.params import GatewayParams
from shared.domain.instance import LatencyModel
from tests.support.gateway import gateway_of, quick_fleet, until

CALL = {"model": "default", "messages": [{"role": "user", "content": "tell me everything"}]}
SLOW = LatencyModel(prefill_s_per_token=1e-7, weights_s=30.0)
AGES_S = 3_600.0
PATIENCE_S = 60.0


@asynccontextmanager
async def busy_mesh(drain_s: float, client: httpx.AsyncClient):
    """Yield a mesh with a call open that takes hours."""
    params = EmbeddedParams(
        fleet=quick_fleet(1, latency=SLOW), tunes=False, drain_s=drain_s, gateway=GatewayParams()
    )
    async with asyncio.TaskGroup() as group, open_embedded(params) as mesh:
        address = f"{mesh.gateway_url}/v1/chat/completions"
        call = group.create_task(client.post(address, json=CALL), name="call")
        desk = gateway_of(mesh).desk
        await until(lambda: desk is not None and desk.num_open == 1, "the call was not taken")
        yield mesh
    assert call.result().status_code == 503  # whoever asked is told


async def test_a_mesh_that_is_left_with_an_error_ends_at_once():
    """So does one whose user stops it twice: nobody waits for its drain then."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client, asyncio.timeout(PATIENCE_S):
        with pytest.raises(ExceptionGroup):
            async with busy_mesh(AGES_S, client):
                raise ValueError("the user's own")


async def test_the_time_for_the_end_runs_from_its_begin():
    """Gateway and worker share what is left of it, and whoever asked is told."""
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
        asyncio.timeout(PATIENCE_S),
        busy_mesh(0.2, client) as mesh,
    ):
        assert mesh.ending.left_s == mesh.ending.bound_s
    assert mesh.ending.left_s < mesh.ending.bound_s
