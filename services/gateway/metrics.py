"""What the gateway counts, besides what every service does."""

from shared.runtime.metrics import Metrics


class GatewayMetrics(Metrics):
    """The gateway's metrics."""

    def __init__(self) -> None:
        super().__init__("gateway")
        self.requests = self._counter(
            "hexflow_http_requests", "Requests answered, by route and status", ("route", "status")
        )
        self.request_s = self._histogram(
            "hexflow_http_request_seconds", "Time to the end of the answer, wall clock", ("kind",)
        )
        self.open_calls = self._gauge("hexflow_gateway_open_calls", "Calls with a client", ())
        self.event_clients = self._gauge("hexflow_gateway_event_clients", "Open event streams", ())
        self.gone = self._counter(
            "hexflow_gateway_clients_gone", "Calls whose client went away before the end", ()
        )
        self.key_reloads = self._counter(
            "hexflow_gateway_key_reloads", "Readings of the keys file, by result", ("result",)
        )
