"""OpenTelemetry traces: one per query, across HTTP, Kafka, dispatch, queue, engine and database.

Off unless `HEXFLOW_TRACES__ENDPOINT` names a collector: nothing is imported then, and the trace
context is passed on as it came. Spans carry no text of prompts or answers.

Names and attributes follow OpenTelemetry's semantic conventions for messaging and generative AI
(https://opentelemetry.io/docs/specs/semconv/); what they have no name for starts with `hexflow.`.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from shared.errors import ConfigError
from shared.ports import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

    from shared.runtime.settings import TraceSettings

Kind = Literal["server", "client", "producer", "consumer", "internal"]
Value = str | int | float | bool
FLUSH_WITHIN_S = 5.0
NANO = 1_000_000_000
WELL_FORMED = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Span:
    """A piece of work that is traced.

    Attributes:
        traceparent: W3C trace context for what follows from it; None when nobody traces.
    """

    def __init__(self, traceparent: str | None, span: Any = None) -> None:
        self.traceparent = traceparent
        self._span = span

    def end(
        self,
        *,
        at_unix_s: float | None = None,
        error: str | None = None,
        attributes: Mapping[str, Value | None] | None = None,
    ) -> None:
        """End it; later calls do nothing.

        Args:
            at_unix_s: When; now by default.
            error: Constant word that says why it failed, if it did.
            attributes: What became known meanwhile; None values are left out.
        """
        if self._span is None:
            return
        self._span.set_attributes(_known(attributes))
        if error is not None:
            from opentelemetry.trace import StatusCode  # noqa: PLC0415 - an optional package

            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(None if at_unix_s is None else round(at_unix_s * NANO))
        self._span = None


class Traces:
    """Starts spans.

    Args:
        tracer: OpenTelemetry's; None: nothing is traced.
    """

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        self._tracer = tracer

    @property
    def is_on(self) -> bool:
        """Whether anything is traced."""
        return self._tracer is not None

    def start(
        self,
        name: str,
        kind: Kind,
        parent: str | None,
        *,
        at_unix_s: float | None = None,
        attributes: Mapping[str, Value | None] | None = None,
    ) -> Span:
        """Begin a span.

        Args:
            name: Few different ones: an operation, never an id.
            kind: Its role.
            parent: W3C trace context of what it follows from; None or nonsense: it is the first.
            at_unix_s: When it began; now by default.
            attributes: What is known of it; None values are left out.
        """
        if self._tracer is None:
            return Span(parent if parent and WELL_FORMED.fullmatch(parent) else None)
        from opentelemetry.trace import SpanKind  # noqa: PLC0415 - an optional package
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        propagator = TraceContextTextMapPropagator()
        context = propagator.extract({"traceparent": parent} if parent else {})
        span = self._tracer.start_span(
            name,
            context=context,
            kind=SpanKind[kind.upper()],
            attributes=_known(attributes),
            start_time=None if at_unix_s is None else round(at_unix_s * NANO),
        )
        carrier: dict[str, str] = {}
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        propagator.inject(carrier, set_span_in_context(span))
        return Span(carrier.get("traceparent", parent), span)

    @contextmanager
    def around(
        self,
        name: str,
        kind: Kind,
        parent: str | None,
        *,
        attributes: Mapping[str, Value | None] | None = None,
    ) -> Iterator[Span]:
        """Trace a block; what is published or traced inside it follows from it.

        Args:
            name: An operation, never an id.
            kind: Its role.
            parent: W3C trace context of what it follows from.
            attributes: What is known of it.
        """
        span = self.start(name, kind, parent, attributes=attributes)
        token = _HERE.set((self, span.traceparent))
        try:
            yield span
        except Exception as exc:
            span.end(error=type(exc).__name__)
            raise
        finally:
            _HERE.reset(token)
            span.end()


NO_TRACES = Traces()
_HERE: ContextVar[tuple[Traces, str | None]] = ContextVar("traces", default=(NO_TRACES, None))


def traceparent_here() -> str | None:
    """Return the W3C trace context of the block that runs, if it is traced."""
    return _HERE.get()[1]


def traceparent_of(record: Record) -> str | None:
    """Return the W3C trace context of a record, when there is one."""
    for name, value in record.headers:
        if name == "traceparent":
            return value.decode("ascii", errors="ignore")[:128] or None
    return None


@contextmanager
def around_here(
    name: str, kind: Kind, *, attributes: Mapping[str, Value | None] | None = None
) -> Iterator[Span]:
    """Trace a block as a part of the one that it stands in.

    Args:
        name: An operation, never an id.
        kind: Its role.
        attributes: What is known of it.
    """
    traces, parent = _HERE.get()
    with traces.around(name, kind, parent, attributes=attributes) as span:
        yield span


@asynccontextmanager
async def open_traces(settings: "TraceSettings", service: str, name: str) -> AsyncIterator[Traces]:
    """Send spans to the collector of the settings while the block lasts.

    Args:
        settings: Where to; without an endpoint nothing is traced.
        service: `dispatcher`, `worker`, ...
        name: Which of them.

    Raises:
        ConfigError: The packages are not installed.
    """
    if not settings.endpoint:
        yield NO_TRACES
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(
            "HEXFLOW_TRACES__ENDPOINT is set and OpenTelemetry is not installed: "
            "pip install 'hexflow[otel]'"
        ) from exc
    provider = make_provider(service, name, settings.sample_share)
    address = settings.endpoint.rstrip("/") + "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address, timeout=3)))
    try:
        yield Traces(provider.get_tracer("hexflow"))
    finally:
        # It sends what is left and blocks while it does; a collector that is gone delays no exit.
        try:
            async with asyncio.timeout(FLUSH_WITHIN_S):
                await asyncio.to_thread(provider.shutdown)
        except TimeoutError:
            pass


def make_provider(service: str, name: str, sample_share: float) -> "TracerProvider":
    """Return OpenTelemetry's provider for a service; whole traces are sampled or not.

    Args:
        service: `dispatcher`, `worker`, ...
        name: Which of them.
        sample_share: Share of the traces that begin here and are kept, 0 to 1.
    """
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an optional package
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415

    return TracerProvider(
        resource=Resource.create(
            {
                "service.name": f"hexflow-{service}",
                "service.namespace": "hexflow",
                "service.instance.id": name,
            }
        ),
        sampler=ParentBased(TraceIdRatioBased(sample_share)),
        shutdown_on_exit=False,
    )


def _known(attributes: Mapping[str, Value | None] | None) -> dict[str, Value]:
    return {name: value for name, value in (attributes or {}).items() if value is not None}
