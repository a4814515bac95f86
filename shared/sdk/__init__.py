"""The producer SDK: drive workflows of LLM calls, or ask questions, through the mesh.

    async with (
        open_producer(broker, topics, clock, partition=3, store=store) as producer,
        Workflow(producer, "two-drafts", slo_s=60.0, model="llama") as flow,
    ):
        drafts = await flow.stage("draft", [Call(prompt="A"), Call(prompt="B")])  # in parallel
        best = await flow.call("check", Call(prompt=f"Which? {[one.text for one in drafts]}"))

What it keeps for you: request ids that are the same after a crash, one arrival and one deadline for
all calls of a query, parents and think times (the tuner learns from them), the first outcome of a
call and no later one, cancellation of what is still open when the block ends with an error.

A gateway uses two things, on one reply partition of its own each:

- `open_producer` for `/v1/chat/completions`: `emitted = await flow.emit("call", Call(messages=...,
  stream=True))`, then `async for text in emitted.text()` (server-sent events), or `await
  emitted.outcome()`. A client that goes away: `await flow.cancel("client went away")`, or leave
  the block with an error.
- `open_questions` for `POST /v1/queries`: `asked = await questions.ask(QueryRequest(...))`, then
  `async for event in asked.events()` for progress and `await asked.result()` for the answer;
  `await questions.cancel(query_id)` for `DELETE`. `refusal_of(request, agents)` says beforehand
  that nobody could answer; an agent of your own says that it is there with `announce_agent`.

Outcomes are returned whatever their kind; look at `outcome.kind`. Nothing here waits for longer
than the mesh takes to end a call: put `asyncio.timeout` around it for a bound of your own.
"""

from shared.sdk.agents import Refusal, agents_of, announce_agent, refusal_of
from shared.sdk.producer import Producer, Submitted, open_producer
from shared.sdk.questions import Asked, Questions, open_questions
from shared.sdk.workflow import Call, Emitted, Workflow

__all__ = [
    "Asked",
    "Call",
    "Emitted",
    "Producer",
    "Questions",
    "Refusal",
    "Submitted",
    "Workflow",
    "agents_of",
    "announce_agent",
    "open_producer",
    "open_questions",
    "refusal_of",
]
