"""The dashboard in a real browser: headless Chromium, driven by Playwright."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from openai import AsyncOpenAI
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from services.cli.embedded import EmbeddedMesh
from services.gateway.tenants import new_key
from shared.contracts.codec import encode
from shared.contracts.messages import AlphaUpdate, CallTimes, LatencyEvent, ScoreTerms, Usage
from shared.contracts.topics import CONTROL, LATENCY_EVENTS, STAGE_REQUESTS
from tests.support.gateway import gateway_mesh, gateway_of, quick_fleet, until
from tests.support.servers import MissingServerError, do_without

HELLO = [{"role": "user", "content": "a secret question"}]
AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
PATIENCE_MS = 30_000
MANY = 1_000
LONGEST_STALL_MS = 1_000

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Return a browser of this machine."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        do_without(MissingServerError("Chromium is missing: apt-get install chromium"))
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        await opened.close()


@pytest.fixture
async def mesh() -> AsyncIterator[EmbeddedMesh]:
    """Return a mesh with a gateway that tells quickly."""
    async with gateway_mesh(quick_fleet(), event_period_s=0.2, quiet_s=30.0) as opened:
        yield opened


@asynccontextmanager
async def looking(browser: Browser, url: str, scheme: Any = "light") -> AsyncIterator[Page]:
    """Open a page; whatever it complains about fails the test, and so does a foreign request."""
    complaints: list[str] = []
    context = await browser.new_context(
        color_scheme=scheme, viewport={"width": 1440, "height": 900}
    )
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    origin = url.partition("/dashboard")[0]
    page.on("request", lambda one: one.url.startswith(origin) or complaints.append(one.url))
    await page.goto(url)
    yield page
    await context.close()
    assert complaints == []


async def publish(mesh: EmbeddedMesh, topic: str, message: Any, key: str = "k") -> None:
    """Publish a message as a service would."""
    await mesh.broker.publish(mesh.topics.name(topic), encode(message), key=key.encode())


def ended_call(mesh: EmbeddedMesh, query_id: str, number: int = 0, **fields: Any) -> LatencyEvent:
    """Return a call that waited long: its query is late."""
    start_s = mesh.clock.now_s() - 100.0
    return LatencyEvent(
        **{
            "request_id": f"{query_id}-{number}",
            "query_id": query_id,
            "workflow": "text2sql",
            "stage": "revise",
            "iteration": number,
            "model": "default",
            "tenant": "acme",
            "instance_id": "quick-0",
            "kind": "completed",
            "arrival_s": start_s,
            "slo_s": 20.0,
            "t_slo_s": 4.0,
            "t_comp_s": 2.0,
            "alpha": 0.1,
            "usage": Usage(input_tokens=900, output_tokens=40, cached_tokens=100),
            "times": CallTimes(
                ready_at_s=start_s,
                dispatched_at_s=start_s + 0.1,
                queued_at_s=start_s + 0.2,
                started_at_s=start_s + 30.0,
                first_token_at_s=start_s + 31.0,
                finished_at_s=start_s + 33.0,
            ),
            "terms": ScoreTerms(
                policy="hexgen-flow",
                score=-0.2,
                t_queue_s=30.0,
                t_comp_s=2.0,
                alpha=0.1,
                beta_s2=4.0,
                others={"quick-1": (40.0, 2.0)},
            ),
            **fields,
        }
    )


async def violations(page: Page) -> list[str]:
    """Return what axe finds wrong with the page as it is."""
    await page.evaluate(AXE.read_text())
    found = await page.evaluate("axe.run()")
    return [
        f"{one['id']}: {node['target']} {node.get('failureSummary', '')}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


async def test_it_updates_while_calls_run(mesh: EmbeddedMesh, browser: Browser):
    """A call made while somebody looks appears in the tiles and in the list, without its text."""
    async with looking(browser, mesh.gateway_url) as page:
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#fleet tbody tr")).to_have_count(2)
        async with AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none") as client:
            for number in range(3):
                await client.chat.completions.create(
                    model="default",
                    messages=HELLO,
                    max_tokens=5,
                    extra_headers={"x-hexflow-query-id": f"live-{number}"},
                )
        await page.click("[data-view=queries]")
        await expect(page.locator("#queries tbody tr")).to_have_count(3)
        assert "secret" not in await page.content()


async def test_the_waterfall_of_a_late_query_explains_it(mesh: EmbeddedMesh, browser: Browser):
    """It says how late, where the time went, and why the call ran where it did."""
    await publish(mesh, LATENCY_EVENTS, ended_call(mesh, "slow/query"))
    async with looking(browser, mesh.gateway_url) as page:
        await page.click("[data-view=queries]")
        await page.select_option("#filter-outcome", "late")
        await page.click("#queries tbody button")
        await expect(page.locator("#query .why")).to_contain_text("Late by 13.0 s")
        await expect(page.locator("#query .why")).to_contain_text("waiting for an instance")
        await page.click(".call summary")
        await expect(page.locator(".detail")).to_contain_text("hexgen-flow chose quick-0")
        rows = page.locator(".detail tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text("quick-0 (chosen)")
        assert "#/queries/slow%2Fquery" in page.url
        await page.reload()
        await expect(page.locator("#query-title")).to_have_text("slow/query")


async def test_alpha_is_shown_with_the_tuners_reasons(mesh: EmbeddedMesh, browser: Browser):
    """Every change has its row, also one that comes while somebody looks."""
    async with looking(browser, f"{mesh.gateway_url}/dashboard/#/alpha") as page:
        await expect(page.locator("#no-alphas")).to_be_visible()
        for revision, alpha in enumerate((0.1, 0.02)):
            update = AlphaUpdate(
                pool="default",
                alpha=alpha,
                previous_alpha=0.5,
                revision=revision,
                reason=f"replay {revision} says P95 falls by 12%",
                predicted_p95_s=31.0,
                at_s=mesh.clock.now_s(),
            )
            await publish(mesh, CONTROL, update, "alpha/default")
        await expect(page.locator("#alphas tbody tr")).to_have_count(2)
        await expect(page.locator("#alphas tbody tr").first).to_contain_text("replay 1")
        await expect(page.locator("#chart-alpha canvas")).to_be_visible()


async def test_a_dead_letter_is_replayed(mesh: EmbeddedMesh, browser: Browser):
    """Its original bytes are sent again, once per click, and its text stays hidden."""
    await mesh.broker.publish(mesh.topics.name(STAGE_REQUESTS), b"secret junk", key=b"q")
    letters = gateway_of(mesh).letters
    await until(lambda: letters.num_seen == 1, "no dead letter")
    async with looking(browser, f"{mesh.gateway_url}/dashboard/#/dead-letters") as page:
        await expect(page.locator("#letters tbody tr")).to_have_count(1)
        assert "secret" not in await page.content()
        await page.locator("#letters button", has_text="Replay").click()
        await expect(page.locator("#letter-status")).to_contain_text("Sent again: stage-requests")
        # nobody can read it now either, so it comes back as a second letter
        await expect(page.locator("#letters tbody tr")).to_have_count(2)
        await expect(page.locator("#letters tbody tr").last).to_contain_text("Replay again")


async def test_a_thousand_queries_do_not_stall_the_page(mesh: EmbeddedMesh, browser: Browser):
    """With 1,000 rows and a stream of changes the page goes on answering."""
    for number in range(MANY):
        await publish(mesh, LATENCY_EVENTS, ended_call(mesh, f"q{number:04}"))
    board = gateway_of(mesh).board
    await until(lambda: len(board) == MANY, "not all queries were taken")
    async with looking(browser, f"{mesh.gateway_url}/dashboard/#/queries") as page:
        await expect(page.locator("#queries tbody tr")).to_have_count(MANY)
        await page.evaluate(
            """() => { window.stalls = [];
            new PerformanceObserver((list) => list.getEntries().forEach((one) =>
              window.stalls.push(one.duration))).observe({type: "longtask"}); }"""
        )
        for number in range(0, MANY, 3):
            await publish(mesh, LATENCY_EVENTS, ended_call(mesh, f"q{number:04}", 1))
        last = page.locator("#queries tbody tr", has_text="q0999")
        await expect(last.locator("td").last).to_have_text("2")
        await page.mouse.move(300, 500)
        for _ in range(20):
            await page.mouse.wheel(0, 400)
            await page.evaluate("() => new Promise(requestAnimationFrame)")
        stalls = await page.evaluate("window.stalls")
        await page.fill("#filter-id", "q0999")
        await expect(page.locator("#queries tbody tr")).to_have_count(1)
    print(json.dumps({"long_tasks_ms": stalls}))  # noqa: T201 - for those who tune it
    assert max(stalls, default=0) < LONGEST_STALL_MS


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(mesh: EmbeddedMesh, browser: Browser, scheme: str):
    """Every view passes the accessibility check in both themes."""
    await publish(mesh, LATENCY_EVENTS, ended_call(mesh, "slow"))
    update = AlphaUpdate(pool="default", alpha=0.2, revision=1, at_s=mesh.clock.now_s())
    await publish(mesh, CONTROL, update, "alpha/default")
    await mesh.broker.publish(mesh.topics.name(STAGE_REQUESTS), b"junk", key=b"q")
    gateway = gateway_of(mesh)
    await until(lambda: gateway.letters.num_seen == 1 and len(gateway.board) == 1, "not there")
    async with looking(browser, mesh.gateway_url, scheme) as page:
        await expect(page.locator("#fleet tbody tr")).to_have_count(2)
        found = await violations(page)
        await page.click("[data-view=queries]")
        await page.click("#queries tbody button")
        await page.click(".call summary")
        await expect(page.locator(".detail")).to_be_visible()
        found += await violations(page)
        for view, ready in (("alpha", "#alphas tbody tr"), ("letters", "#letters tbody tr")):
            await page.click(f"[data-view={view}]")
            await expect(page.locator(ready)).to_have_count(1)
            found += await violations(page)
    assert found == []


async def test_the_keyboard_reaches_everything(mesh: EmbeddedMesh, browser: Browser):
    """A query is found, opened and read without a mouse."""
    await publish(mesh, LATENCY_EVENTS, ended_call(mesh, "slow"))
    async with looking(browser, mesh.gateway_url) as page:
        await expect(page.locator("#fleet tbody tr")).to_have_count(2)
        await page.keyboard.press("Tab")
        await expect(page.locator(".skip")).to_be_focused()
        for _ in range(2):
            await page.keyboard.press("Tab")
        await expect(page.locator("[data-view=queries]")).to_be_focused()
        await page.keyboard.press("Enter")
        await page.locator("#filter-id").focus()
        await expect(page.locator("#queries tbody tr")).to_have_count(1)
        await page.keyboard.press("Tab")
        await page.keyboard.press("Tab")
        await expect(page.locator("#queries tbody button")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#query")).to_be_focused()
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator(".detail")).to_be_visible()


async def test_a_gateway_with_keys_asks_for_one(browser: Browser, tmp_path: Path):
    """Data needs an administrator's key; a wrong one is told, the right one opens the view."""
    key, stored = new_key()
    other, other_stored = new_key()
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[tenants.ops]\nkeys = ["{stored}"]\nadmin = true\n'
        f'[tenants.acme]\nkeys = ["{other_stored}"]\n'
    )
    async with gateway_mesh(quick_fleet(1), keys_file=file, event_period_s=0.2) as mesh:
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(mesh.gateway_url)
        for wrong in ("nonsense", other):
            await page.fill("#key", wrong)
            await page.keyboard.press("Enter")
            await expect(page.locator("#key-error")).not_to_be_empty(timeout=PATIENCE_MS)
        await page.fill("#key", key)
        await page.keyboard.press("Enter")
        await expect(page.locator("#connection")).to_have_text("live", timeout=PATIENCE_MS)
        await expect(page.locator("#key-form")).to_be_hidden()
        await context.close()
        await asyncio.sleep(0)
