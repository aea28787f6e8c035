"""The metrics of ``serve``: counters, histograms and gauges of prometheus_client."""

import time
from functools import partial
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from kp_scorer.errors import REASONS, Reason
from kp_scorer.settings.sections import ServeSettings
from kp_scorer.store.runs import Outcome

OTHER: Final = "other"  # The label of requests without a route, because a peer may ask for any path.
_PREFIX: Final = "kp_scorer_serve"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ServeMetrics:
    """The metrics of one process. Any thread may update and read them."""

    def __init__(self) -> None:
        """Begin every series with a known label at 0: queries miss the first increase of a series that starts at 1."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        disable_created_metrics()  # type: ignore[no-untyped-call]
        counter = partial(Counter, namespace=_PREFIX, registry=self.registry)
        gauge = partial(Gauge, namespace=_PREFIX, registry=self.registry)
        self._requests = counter("requests", "Requests answered, by route and status", ("route", "status"))
        about = "Time from the headers of a request to the end of its answer, by route"
        self._request_s = Histogram("request_seconds", about, ("route",), _PREFIX, registry=self.registry, buckets=_SECONDS)
        self.spans = counter("spans", "Spans received, by outcome", ("outcome",))
        self.traces = counter("traces", "Traces received as traces, not as spans, by outcome", ("outcome",))
        self.runs_submitted = counter("runs_submitted", "Runs submitted")
        self.runs_left_out = counter(
            "runs_left_out", "Runs left out, by reason: of no agent, without content, unfinished, or repeated", ("reason",)
        )
        self._dead_letters = counter("dead_letters", "Runs dead-lettered, by reason", ("reason",))
        self.log_lines_dropped = counter("log_lines_dropped", "Log lines dropped because nothing reads the log")
        self.ready = gauge("ready", "1 if runs can be submitted")
        about = "Unix time at which the certificate of new connections expires, +Inf without one"
        self.certificate_expiry = gauge("certificate_expiry_timestamp_seconds", about)
        # These gauges describe what processes share, so all processes show the same values.
        self._runs_open = gauge("runs_open", "Runs being collected")
        self._held_bytes = gauge("held_bytes", "Bytes of the spans of runs being collected")
        self._used = gauge("room_used_ratio", "Fraction in use of 10,000 runs or of serve.total_bytes, whichever is larger")
        for outcome in (*get_args(Outcome), "nameless"):
            self.spans.labels(outcome)
        for outcome in ("pending", "invalid", "conflict"):
            self.traces.labels(outcome)
        for reason in ("no_agent", "no_content", "unfinished", "repeated"):
            self.runs_left_out.labels(reason)
        for reason in REASONS:
            self._dead_letters.labels(reason)

    def count_dead_letter(self, reason: Reason) -> None:
        """Count a run that became a dead letter."""
        self._dead_letters.labels(reason).inc()

    def show_held(self, runs: int, held_bytes: int, limits: ServeSettings) -> None:
        """Show the number of runs that are being collected, and the bytes of their spans."""
        self._runs_open.set(runs)
        self._held_bytes.set(held_bytes)
        self._used.set(max(runs / limits.runs, held_bytes / limits.total_bytes))

    def measured(self, app: Any) -> Any:
        """Return an ASGI application wrapped so that its answers are counted and timed."""

        async def measure(scope: Any, receive: Any, send: Any) -> None:
            status, began_s = 500, time.perf_counter()

            async def send_on(message: Any) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app(scope, receive, send_on)
            finally:
                route = getattr(scope.get("route"), "path_format", OTHER)
                self._requests.labels(route, status).inc()
                self._request_s.labels(route).observe(time.perf_counter() - began_s)

        return measure
