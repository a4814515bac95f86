"""What the tuner decides is a trace, where traces are on."""

import asyncio

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.contracts.topics import CONTROL
from shared.ports import TopicPartition
from shared.runtime.tracing import Traces, make_provider, traceparent_of
from tests.support.tuner_bench import TOPICS, Bench, running
from tests.support.tuning import ChosenReplay

GAIN = {0.7: 40.0, 0.01: 20.0}
SPEEDS = {"a100-0": 1.0}


async def control_headers(bench: Bench) -> dict[str, str | None]:
    """Return the trace context of every record of `control`, by key."""
    tp = TopicPartition(TOPICS.name(CONTROL), 0)
    async with bench.broker.partition_consumer([tp], start="beginning") as consumer:
        records = await consumer.fetch(timeout_s=0.05)
    return {(record.key or b"").decode(): traceparent_of(record) for record in records}


async def test_a_decision_is_a_trace_that_the_new_alpha_carries_on():
    """`tune` holds one `decide` per pool with what it rests on; `control` has its context."""
    exporter = InMemorySpanExporter()
    provider = make_provider("tuner", "tuner-0", 1.0)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider.get_tracer("test"))
    async with running(ChosenReplay(GAIN, SPEEDS), traces=traces) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(exporter.get_finished_spans()) >= 2)
        headers = await control_headers(bench)
    decide, tune = exporter.get_finished_spans()[:2]
    assert (decide.name, tune.name) == ("decide", "tune")
    assert tune.parent is None
    assert decide.parent is not None
    assert decide.parent.span_id == tune.context.span_id
    assert tune.attributes["hexflow.trigger"] == "first"
    assert decide.attributes["hexflow.pool"] == "default"
    assert decide.attributes["hexflow.alpha.before"] == 0.7
    assert decide.attributes["hexflow.alpha"] == 0.01
    assert decide.attributes["hexflow.is_change"] is True
    assert decide.attributes["hexflow.p95.observed_s"] == 40.0
    carried = headers["alpha/default"]
    assert carried is not None
    assert carried.split("-")[1:3] == [
        f"{tune.context.trace_id:032x}",
        f"{tune.context.span_id:016x}",
    ]


async def test_nothing_is_traced_unless_asked_for():
    """Without a collector a decision carries no trace context, and is journalled all the same."""
    async with running(ChosenReplay(GAIN, SPEEDS)) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(bench.decided) >= 1)
        headers = await control_headers(bench)
        while "alpha/default" not in headers:
            await asyncio.sleep(0.01)
            headers = await control_headers(bench)
    assert headers["alpha/default"] is None
