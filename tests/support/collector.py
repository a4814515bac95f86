"""A collector of OpenTelemetry spans: takes OTLP over HTTP on loopback and keeps them in memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class CollectedSpan(NamedTuple):
    """A span as it arrived.

    Attributes:
        service: `service.name` of who sent it.
        name: Its own.
        trace_id: Hexadecimal.
        span_id: Hexadecimal.
        parent_id: Hexadecimal; empty for the first of a trace.
        began_ns: Nanoseconds since 1970.
        ended_ns: Likewise.
        attributes: As text.
    """

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, str]


class Collector:
    """What arrived so far, and where to send it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[CollectedSpan] = []

    def take(self, body: bytes) -> None:
        """Keep the spans of one request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            known = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.spans += [
                CollectedSpan(
                    service=known["service.name"],
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    began_ns=span.start_time_unix_nano,
                    ended_ns=span.end_time_unix_nano,
                    attributes={one.key: str(one.value) for one in span.attributes},
                )
                for scope in resource.scope_spans
                for span in scope.spans
            ]


@contextmanager
def open_collector() -> Iterator[Collector]:
    """Collect while the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
