"""The dashboard's API: what it shows, to whom, and what it hides."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.embedded import EmbeddedMesh
from services.gateway.tenants import new_key
from shared.contracts.codec import encode
from shared.contracts.messages import SpeedUpdate, StageRequest
from shared.contracts.topics import CONTROL, STAGE_REQUESTS
from shared.runtime.settings import MAX_ATTEMPTS
from tests.support.gateway import gateway_mesh, gateway_of, quick_fleet, until

HIDDEN = "a secret question"


def chat(**fields: Any) -> dict[str, Any]:
    """Return the body of a call."""
    messages = [{"role": "user", "content": HIDDEN}]
    return {"model": "default", "messages": messages, "max_tokens": 4, "hexflow": fields}


def http_of(mesh: EmbeddedMesh, key: str = "none") -> httpx.AsyncClient:
    """Return a client with a key."""
    return httpx.AsyncClient(
        base_url=mesh.gateway_url, timeout=60.0, headers={"authorization": f"Bearer {key}"}
    )


async def test_a_query_is_told_with_its_calls_and_without_its_text():
    """Stages, instance, budget, slack and score terms are there; prompt and answer are not."""
    async with gateway_mesh(quick_fleet(3)) as mesh, http_of(mesh) as http:
        answer = await http.post("/v1/chat/completions", json=chat(query_id="q", slo_s=60))
        text = answer.json()["choices"][0]["message"]["content"]
        await until(lambda: len(gateway_of(mesh).board) == 1, "not seen")
        found = await http.get("/api/queries/q")
        (call,) = found.json()["calls"]
        assert call["instance_id"] == answer.json()["hexflow"]["instance_id"]
        assert 0 < call["budget_s"] <= 60
        assert 0 < call["slack_s"] < 60
        assert call["ready_s"] <= call["queued_s"] <= call["started_s"] <= call["finished_s"]
        assert len(call["scores"]) == 3
        assert found.json()["explanation"]["text"].startswith(("In time", "Still running"))
        for path in ("/api/queries/q", "/api/queries", "/api/mesh", "/api/fleet"):
            shown = (await http.get(path)).text
            assert HIDDEN not in shown
            assert json.dumps(text) not in shown
        rows = (await http.get("/api/queries", params={"outcome": "failed"})).json()["data"]
        assert rows == []
        assert (await http.get("/api/queries", params={"outcome": "x"})).status_code == 400
        assert (await http.get("/api/queries", params={"limit": "0"})).status_code == 400
        assert (await http.get("/api/queries/unknown")).status_code == 404


async def test_the_fleet_shows_waiting_calls_by_urgency_and_drift():
    """While somebody looks, each line is read; what the tuner learned is shown."""
    fleet = quick_fleet(1, max_num_seqs=1)
    async with gateway_mesh(fleet, event_period_s=0.1) as mesh, http_of(mesh) as http:
        mesh.engines["quick-0"].hang()
        update = SpeedUpdate(instance_id="quick-0", factor=1.5, hit_factor=0.5, revision=1)
        await mesh.broker.publish(mesh.topics.name(CONTROL), encode(update), key=b"speed/quick-0")
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(http.post("/v1/chat/completions", json=chat(slo_s=slo_s)))
                for slo_s in (600, 0.01, 600)
            ]

            async def waiting() -> Any:
                async with http.stream("GET", "/api/events") as events:
                    async for line in events.aiter_lines():
                        if line.startswith("data: "):
                            (one,) = json.loads(line[6:])["fleet"]
                            waits = sum(one["waiting_by_slack"] or ())
                            # Each comes from a place of its own, and not at the same moment.
                            if (waits, one["running"], one["drift"]) == (2, 1, 1.5):
                                return one
                return None

            one = await waiting()
            mesh.engines["quick-0"].recover()
        assert one["waiting_by_slack"][3] >= 1
        assert (one["drift"], one["cache_hits"], one["running"]) == (1.5, 0.5, 1)
        assert {task.result().status_code for task in calls} <= {200, 504}


async def test_an_engine_that_fails_is_shown_as_failing():
    """When a call failed at every attempt, until one ends well."""
    async with gateway_mesh(quick_fleet(1)) as mesh, http_of(mesh) as http:

        async def shows(phase: str) -> None:
            async with asyncio.timeout(30):
                while (await http.get("/api/fleet")).json()["data"][0]["phase"] != phase:
                    await asyncio.sleep(0.01)

        await shows("serving")
        mesh.engines["quick-0"].fail_next(MAX_ATTEMPTS)
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 502
        await shows("failing")
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
        await shows("serving")


async def test_a_refused_call_is_in_the_list():
    """A call that no instance ever had is known to the gateway that made it."""
    async with gateway_mesh(quick_fleet(1, max_context_tokens=64)) as mesh, http_of(mesh) as http:
        body = {**chat(query_id="q"), "max_tokens": 1_000}
        answer = await http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_eligible_instance")
        (row,) = (await http.get("/api/queries")).json()["data"]
        assert (row["query_id"], row["outcome"]) == ("q", "rejected")


async def test_a_tenant_sees_its_own_queries_only(tmp_path: Path):
    """Another tenant's queries, the fleet and dead letters are an administrator's business."""
    keys = {name: new_key() for name in ("acme", "zeta", "ops")}
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(
            f'[tenants.{name}]\nkeys = ["{stored}"]\nadmin = {str(name == "ops").lower()}\n'
            for name, (_, stored) in keys.items()
        )
    )
    async with gateway_mesh(quick_fleet(1), keys_file=file) as mesh:
        for name in ("acme", "zeta"):
            async with http_of(mesh, keys[name][0]) as http:
                body = chat(query_id="q")
                assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        await until(lambda: len(gateway_of(mesh).board) == 2, "not seen")
        async with http_of(mesh, keys["acme"][0]) as http:
            rows = (await http.get("/api/queries", params={"tenant": "zeta"})).json()["data"]
            assert [row["query_id"] for row in rows] == ["acme/q"]
            assert (await http.get("/api/queries/acme/q")).status_code == 200
            assert (await http.get("/api/queries/zeta/q")).status_code == 404
            for path in ("/api/mesh", "/api/fleet", "/api/events", "/api/alpha"):
                assert (await http.get(path)).status_code == 403
            assert (await http.post("/api/dead-letters/0/replay")).status_code == 403
        async with http_of(mesh, keys["ops"][0]) as http:
            assert len((await http.get("/api/queries")).json()["data"]) == 2
            assert (await http.get("/api/mesh")).status_code == 200


@pytest.mark.parametrize("shows_text", [False, True])
async def test_the_text_of_a_dead_letter(shows_text: bool):
    """It is hidden unless the gateway was set up to show it."""
    async with gateway_mesh(quick_fleet(1), shows_text=shows_text) as mesh, http_of(mesh) as http:
        call = StageRequest(request_id="r", model="default", prompt=HIDDEN)
        raw = encode(call).replace(b"stage_request", b"stage_rekwest")
        await mesh.broker.publish(mesh.topics.name(STAGE_REQUESTS), raw, key=b"q")
        await until(lambda: gateway_of(mesh).letters.num_seen == 1, "no dead letter")
        listed = await http.get("/api/dead-letters")
        (letter,) = listed.json()["data"]
        assert (letter["request_id"], letter["topic"]) == ("r", STAGE_REQUESTS)
        assert HIDDEN not in listed.text
        shown = await http.get(f"/api/dead-letters/{letter['offset']}/text")
        assert shown.status_code == (200 if shows_text else 403)
        assert (HIDDEN in shown.text) is shows_text
        path = f"/api/dead-letters/{letter['offset']}/replay"
        assert (await http.post(path)).status_code == 200
        assert (await http.post(path)).status_code == 409
        assert (await http.post(path, params={"again": "true"})).status_code == 200
        assert (await http.post("/api/dead-letters/99/replay")).status_code == 404
        await until(lambda: gateway_of(mesh).letters.num_seen == 3, "not replayed")
