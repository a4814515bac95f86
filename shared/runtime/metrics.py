"""The mesh's Prometheus metrics: names with units, bounded labels, one registry per service.

A registry is an object that is passed, not a global: several services can live in one process.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000)


class Metrics:
    """What a service counts.

    Args:
        service: Service name, a constant label.
        instance_id: Instance for workers; empty elsewhere.
    """

    def __init__(self, service: str, instance_id: str = "") -> None:
        self.registry = CollectorRegistry()
        self._const = {"service": service, "instance": instance_id}
        self._labels = tuple(self._const)
        self.messages = self._counter("hexflow_messages_read", "Records read, by topic", ("topic",))
        self.dead_letters = self._counter(
            "hexflow_dead_letters", "Messages given up, by reason", ("reason",)
        )
        self.outcomes = self._counter(
            "hexflow_call_outcomes", "Outcomes published, by kind and reason", ("kind", "reason")
        )
        self.handed_back = self._counter(
            "hexflow_calls_handed_back", "Calls put back on stage-requests, by cause", ("cause",)
        )
        self.duplicates = self._counter(
            "hexflow_duplicates_dropped",
            "Deliveries dropped as already known, by topic",
            ("topic",),
        )
        self.unreadable = self._counter(
            "hexflow_records_unreadable",
            "Records of followed topics skipped as unreadable, by topic and reason",
            ("topic", "reason"),
        )
        self.arrivals_refused = self._counter(
            "hexflow_arrivals_refused",
            "Claimed query arrivals not believed, by cause",
            ("cause",),
        )
        self.fences = self._counter(
            "hexflow_instances_fenced", "Instances declared dead by recovery", ()
        )
        self.dispatched = self._counter(
            "hexflow_calls_dispatched", "Calls bound to an instance", ("target",)
        )
        self.started = self._counter("hexflow_calls_started", "Calls handed to the engine", ())
        self.demoted = self._counter(
            "hexflow_calls_demoted", "Calls put behind those that can still be in time", ()
        )
        self.queries_ended = self._counter(
            "hexflow_queries_ended", "Questions answered or given up, by kind", ("kind", "workflow")
        )
        self.queries_open = self._gauge("hexflow_queries_open", "Questions under way", ())
        self.waiting = self._gauge("hexflow_calls_waiting", "Calls in the queue", ())
        self.running = self._gauge("hexflow_calls_running", "Calls in the engine", ())
        self.backlog = self._gauge("hexflow_backlog_seconds", "Expected work bound here", ())
        self.alpha = self._gauge("hexflow_alpha", "α in force, by pool", ("pool",))
        self.events_ignored = self._counter(
            "hexflow_events_ignored", "Latency events that cannot be true, by cause", ("cause",)
        )
        self.decisions = self._counter(
            "hexflow_tuning_decisions", "Decisions about α, by result", ("result",)
        )
        self.window_s = self._gauge(
            "hexflow_window_latency_seconds",
            "End-to-end time of the tuner's window, by quantile, tenant and workflow",
            ("quantile", "tenant", "workflow"),
        )
        self.window_attainment = self._gauge(
            "hexflow_window_attainment",
            "Share of the window's queries within their SLO, by tenant and workflow",
            ("tenant", "workflow"),
        )
        self.calibration = self._gauge(
            "hexflow_calibration_error", "|simulated / observed P95 - 1| of the window", ("pool",)
        )
        self.advised = self._gauge(
            "hexflow_advised_setting",
            "Value of an engine setting that the tuner predicts to be better, by pool",
            ("pool", "setting"),
        )
        self.speed = self._gauge(
            "hexflow_speed_factor", "Learned time ÷ profiled time, by instance", ("target",)
        )
        self.ready = self._gauge("hexflow_ready", "1 while the service can do its work", ())
        self.silence = self._gauge(
            "hexflow_loop_silence_ratio",
            "Time since a loop's last turn ÷ the longest it may take; above 1 it is stuck",
            ("loop",),
        )
        self.queue_s = self._histogram(
            "hexflow_call_queue_seconds",
            "Time from ready to engine (mesh clock), by outcome",
            ("kind",),
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> "BoundCounter":
        counter = Counter(name, text, (*self._labels, *labels), registry=self.registry)
        return BoundCounter(counter, self._const)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]) -> "BoundGauge":
        gauge = Gauge(name, text, (*self._labels, *labels), registry=self.registry)
        return BoundGauge(gauge, self._const)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...]) -> "BoundHistogram":
        histogram = Histogram(
            name, text, (*self._labels, *labels), registry=self.registry, buckets=LATENCY_BUCKETS_S
        )
        return BoundHistogram(histogram, self._const)

    def render(self) -> bytes:
        """Return the exposition text of this service's registry."""
        return bytes(generate_latest(self.registry))

    def totals(self) -> dict[str, float]:
        """Return every counter as `name{label=value,...}` -> value, for logs and audits."""
        found: dict[str, float] = {}
        for family in self.registry.collect():
            if family.type != "counter":
                continue
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    own = {k: v for k, v in sample.labels.items() if k not in self._const}
                    text = ",".join(f"{k}={v}" for k, v in sorted(own.items()))
                    found[f"{sample.name}{{{text}}}"] = sample.value
        return found


class BoundCounter:
    """A counter with the service's constant labels filled in."""

    def __init__(self, counter: Counter, const: dict[str, str]) -> None:
        self._counter = counter
        self._const = const

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Add to the counter."""
        self._counter.labels(**self._const, **labels).inc(amount)


class BoundGauge:
    """A gauge with the service's constant labels filled in."""

    def __init__(self, gauge: Gauge, const: dict[str, str]) -> None:
        self._gauge = gauge
        self._const = const

    def set(self, value: float, **labels: str) -> None:
        """Set the gauge."""
        self._gauge.labels(**self._const, **labels).set(value)

    def clear(self) -> None:
        """Forget all labels: what is not set again is not reported."""
        self._gauge.clear()


class BoundHistogram:
    """A histogram with the service's constant labels filled in."""

    def __init__(self, histogram: Histogram, const: dict[str, str]) -> None:
        self._histogram = histogram
        self._const = const

    def observe(self, value: float, **labels: str) -> None:
        """Add one observation."""
        self._histogram.labels(**self._const, **labels).observe(value)
