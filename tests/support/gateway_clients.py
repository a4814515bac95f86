"""Clients of several gateways, with what stands in front of them in a cluster in between.

New requests go to gateways whose `/ready` says so, in turn. One whose connection is refused goes to
another; nothing else is tried again, and whatever else goes wrong is written down.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import httpx

from services.text2sql.samples.writing import Question
from shared.adapters.local_process import LOOPBACK
from tests.support.scripted_server import count_prompt, counted

LOOK_S = 0.1
PROBE_S = 2.0
NO_GATEWAY_S = 60.0
ANSWER_S = 180.0
SLO_S = 600.0
LONGEST_REST_S = 0.4
LOOK_REST_S = 0.02
DONE = "data: [DONE]"


class Front:
    """Chooses a gateway for each request.

    Args:
        ports: Gateway -> where it serves.
        probes: Gateway -> where it says whether it is ready.
    """

    def __init__(self, ports: Mapping[str, int], probes: Mapping[str, int]) -> None:
        self.num_open: Counter[str] = Counter()
        """Gateway -> requests under way there."""
        self.num_refused = 0
        """Connections refused, and tried elsewhere."""
        self._probes = {name: f"http://{LOOPBACK}:{port}/ready" for name, port in probes.items()}
        self._clients = {
            name: httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{port}", timeout=ANSWER_S)
            for name, port in ports.items()
        }
        self._ready: list[str] = []
        self._turn = itertools.count()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, ports: Mapping[str, int], probes: Mapping[str, int]
    ) -> AsyncIterator["Front"]:
        """Look at the gateways for as long as the block lasts."""
        front = cls(ports, probes)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(front._watch(), name="readiness")
            try:
                yield front
            finally:
                watching.cancel()
                for client in front._clients.values():
                    await client.aclose()

    @asynccontextmanager
    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request; its answer is read in the block."""
        refused: set[str] = set()
        while True:
            name = await self._choose(refused)
            client = self._clients[name]
            self.num_open[name] += 1
            try:
                request = client.build_request(method, path, json=body, headers=headers)
                try:
                    response = await client.send(request, stream=True)
                except httpx.ConnectError as exc:
                    if not _is_refused(exc):
                        raise
                    self.num_refused += 1
                    refused.add(name)
                    continue
                try:
                    yield response
                finally:
                    await response.aclose()
            finally:
                self.num_open[name] -= 1
            return

    async def _choose(self, refused: set[str]) -> str:
        async with asyncio.timeout(NO_GATEWAY_S):
            while True:
                usable = [name for name in self._ready if name not in refused]
                if usable:
                    return usable[next(self._turn) % len(usable)]
                refused.clear()
                await asyncio.sleep(LOOK_S)

    async def _watch(self) -> None:
        async with httpx.AsyncClient(timeout=PROBE_S) as client:
            while True:
                self._ready = [
                    name for name, url in self._probes.items() if await _says_ready(client, url)
                ]
                await asyncio.sleep(LOOK_S)


async def _says_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _is_refused(exc: BaseException | None) -> bool:
    """Return whether nobody listens where a connection was to go."""
    while exc is not None:
        if isinstance(exc, ConnectionRefusedError):
            return True
        if isinstance(exc, BaseExceptionGroup):
            return all(_is_refused(one) for one in exc.exceptions)
        exc = exc.__cause__ or exc.__context__
    return False


class Load:
    """Clients that ask one request after the other, and say what was not as it has to be.

    Args:
        front: Where to.
        questions: What agents are asked.
        seed: Of the pauses between requests.
    """

    def __init__(self, front: Front, questions: tuple[Question, ...], seed: int = 1) -> None:
        self.failures: list[str] = []
        self.num_ended: Counter[str] = Counter()
        """What was asked for -> how often it came, whole and right."""
        self.query_ids: list[str] = []
        self._front = front
        self._questions = itertools.cycle(questions)
        self._numbers = itertools.count(1)
        self._rng = Random(seed)

    async def run(self, num_chats: int, num_questions: int, stop: asyncio.Event) -> None:
        """Ask until `stop` is set; returns when everything has been answered.

        Args:
            num_chats: Clients that chat.
            num_questions: Clients that ask agents.
            stop: Ends it.
        """
        async with asyncio.TaskGroup() as group:
            for index in range(num_chats):
                streams = bool(index % 2)
                group.create_task(self._chats(stop, streams=streams), name=f"chats-{index}")
            for index in range(num_questions):
                way = ("followed", "whole", "left")[index % 3]
                group.create_task(self._ask(stop, way), name=f"questions-{index}")
            for headers in ({}, {"connection": "close"}):
                group.create_task(self._look(stop, headers), name="looks")

    async def _look(self, stop: asyncio.Event, headers: dict[str, str]) -> None:
        """Ask what is answered at once, often: on a kept connection, or on a new one each time."""
        what = "on a new connection" if headers else "on a kept connection"
        while not stop.is_set():
            number = next(self._numbers)
            try:
                async with self._front.send("GET", "/v1/models", headers=headers) as answer:
                    found = (await _json(answer))["object"]
            except (httpx.HTTPError, WrongAnswerError) as exc:
                self._fail(what, number, exc)
            else:
                self._note(what, number, found, "list")
            await asyncio.sleep(self._rng.uniform(0.0, LOOK_REST_S))

    async def _chats(self, stop: asyncio.Event, *, streams: bool) -> None:
        what = "stream" if streams else "chat"
        while not stop.is_set():
            number = next(self._numbers)
            body = {
                "model": "default",
                "messages": [{"role": "user", "content": count_prompt(number)}],
                "max_tokens": 64,
                "stream": streams,
                "hexflow": {"slo_s": SLO_S},
            }
            try:
                async with self._front.send("POST", "/v1/chat/completions", body) as answer:
                    text = await (_streamed(answer) if streams else _whole(answer))
            except (httpx.HTTPError, WrongAnswerError) as exc:
                self._fail(what, number, exc)
            else:
                self._note(what, number, text, counted(number))
            await asyncio.sleep(self._rng.uniform(0.0, LONGEST_REST_S))

    async def _ask(self, stop: asyncio.Event, way: str) -> None:
        while not stop.is_set():
            question, number = next(self._questions), next(self._numbers)
            query_id = f"{question.id}-{number}"
            self.query_ids.append(query_id)
            body = {
                "question": question.question,
                "hint": question.hint,
                "database": "league",
                "query_id": query_id,
                "slo_s": SLO_S,
                "stream": way != "whole",
            }
            try:
                result = await self._result(body, way)
            except (httpx.HTTPError, WrongAnswerError) as exc:
                self._fail(way, number, exc)
            else:
                said = (result["kind"], " ".join(result["sql"].split()))
                self._note(way, number, said, ("completed", " ".join(question.sql.split())))

    async def _result(self, body: dict[str, Any], way: str) -> dict[str, Any]:
        async with self._front.send("POST", "/v1/queries", body) as answer:
            if way == "whole":
                found: dict[str, Any] = (await _json(answer))["result"]
                return found
            if way == "followed":
                return (await _events(answer))["result"]
            await anext(answer.aiter_lines())
        while True:  # whoever has left comes back, to any gateway
            await asyncio.sleep(LONGEST_REST_S)
            async with self._front.send("GET", f"/v1/queries/{body['query_id']}") as answer:
                state = await _json(answer)
            if state["state"] == "ended":
                return dict(state["result"])

    def _note(self, what: str, number: int, found: object, expected: object) -> None:
        if found == expected:
            self.num_ended[what] += 1
        else:
            self.failures.append(f"{what} {number}: {found!r}")

    def _fail(self, what: str, number: int, exc: Exception) -> None:
        self.failures.append(f"{what} {number}: {type(exc).__name__}: {exc}")


class WrongAnswerError(Exception):
    """An answer is not what it has to be."""


async def _json(answer: httpx.Response) -> dict[str, Any]:
    body = await answer.aread()
    if answer.status_code != httpx.codes.OK:
        raise WrongAnswerError(f"{answer.status_code} {body.decode()}")
    return dict(json.loads(body))


async def _whole(answer: httpx.Response) -> str:
    choice = (await _json(answer))["choices"][0]
    if choice["finish_reason"] != "stop":
        raise WrongAnswerError(str(choice))
    return str(choice["message"]["content"])


async def _streamed(answer: httpx.Response) -> str:
    """Return the text of a stream that came to its end."""
    if answer.status_code != httpx.codes.OK:
        await _json(answer)
    texts, reasons, last = [], [], ""
    async for line in answer.aiter_lines():
        if not line:
            continue
        last = line
        if line == DONE or not line.startswith("data: "):
            continue
        part = json.loads(line.removeprefix("data: "))
        if "error" in part:
            raise WrongAnswerError(line)
        for choice in part["choices"]:
            texts.append(choice["delta"].get("content") or "")
            reasons.append(choice["finish_reason"])
    if last != DONE or "stop" not in reasons:
        raise WrongAnswerError(f"it broke off after {len(texts)} pieces: {last}")
    return "".join(texts)


async def _events(answer: httpx.Response) -> dict[str, Any]:
    """Return the last data of every kind of event."""
    if answer.status_code != httpx.codes.OK:
        await _json(answer)
    found: dict[str, Any] = {}
    kind = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found[kind] = json.loads(line.removeprefix("data: "))
            if "error" in found[kind]:
                raise WrongAnswerError(line)
    if "result" not in found:
        raise WrongAnswerError(f"it broke off after {sorted(found)}")
    return found
