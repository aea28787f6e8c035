"""The metrics of a worker: counters, histograms and gauges of prometheus_client, and its report for ``kp-scorer stats``."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, disable_created_metrics
from prometheus_client.registry import Collector

from kp_scorer.broker.backlog import Backlog
from kp_scorer.decision import CheckFailure, Decision, Outcome, Override
from kp_scorer.errors import REASONS, Reason
from kp_scorer.report.drift import BINS, bins_of
from kp_scorer.store.store import Timing, WorkerReport

# The label of all domains that neither a setting nor a profile names, as producers may write any.
UNNAMED_DOMAIN: Final = "other"

_PREFIX: Final = "kp_scorer"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0)
_FRACTIONS: Final = tuple(twentieths / 20 for twentieths in range(1, 20))
_TOKENS: Final = (32.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 4_096.0, 65_536.0)
_SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Metrics:
    """The metrics of one process. Any thread may update and read them, and no call waits for Redis or the broker."""

    def __init__(self, domains: Collection[str], checks: Iterable[str] = (), queues: Iterable[str] = ()) -> None:
        """Define all metrics; count each of these domains by its name, and all others under :data:`UNNAMED_DOMAIN`.

        The series of these ``checks`` and ``queues`` exist from the start.
        """
        self._domains = frozenset(domains)
        self._checks = tuple(checks)
        self._labels = sorted(self._domains | {UNNAMED_DOMAIN})
        self._outcomes: Sequence[tuple[Outcome, str]] = list(product(get_args(Outcome), self._labels))
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        # Without this, each counter has a second time series, with the time of its creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._define_counters()
        self._define_histograms()
        self._define_gauges()
        for queue in queues:
            self._queue_wait_s.labels(queue)
            self._deliveries.labels(queue)

    def _define_counters(self) -> None:
        counter = partial(Counter, namespace=_PREFIX, registry=self.registry)
        self._decisions = counter("decisions", "Decisions published, by outcome and domain", ("outcome", "domain"))
        about = "Decisions made, by domain and the bin of each dimension, the score and the outcome"
        values = counter("values", about, ("domain", "dimension", "bin"))
        self._decisions_dropped = counter("decisions_dropped", "Decisions dropped unread for newer ones", ("queue",))
        self._overrides = counter("overrides", "Rules that changed a score, by rule", ("override",))
        self._dead_letters = Counter("dead_letters", "Dead letters that this worker stored, for its report", registry=None)
        self._dropped = counter("dead_letters_dropped", "Dead letters dropped to make room, by reason", ("reason",))
        self._deliveries = counter("deliveries", "Messages delivered", ("queue",))
        self._redeliveries = counter("redeliveries", "Messages redelivered")
        self._findings = counter("check_findings", "Findings of checks in traces, of all kinds, by check", ("check",))
        self._failures = counter("check_failures", "Checks that failed, by check and failure", ("check", "failure"))
        self.revisions = counter("revisions", "Decisions published that revise earlier ones by late outcomes", ("outcome",))
        self.resends = counter("resends", "Lost submissions that were sent again")
        self.log_lines_dropped = counter("log_lines_dropped", "Log lines dropped because nothing reads the log")
        # Each series starts at 0: queries miss the first increase of a series that starts at 1.
        for outcome, domain in self._outcomes:
            self._decisions.labels(outcome, domain)
        self._values = {(domain, *each): values.labels(domain, *each) for domain, each in product(self._labels, BINS)}
        for outcome in get_args(Outcome):
            self.revisions.labels(outcome)
        for override in get_args(Override):
            self._overrides.labels(override)
        for check, failure in product(self._checks, get_args(CheckFailure)):
            self._findings.labels(check)
            self._failures.labels(check, failure)
        for reason in REASONS:
            self._dropped.labels(reason)

    def _define_histograms(self) -> None:
        histogram = partial(Histogram, namespace=_PREFIX, registry=self.registry)
        seconds = partial(histogram, buckets=_SECONDS)
        self._score = histogram("score", "Scores of the decisions published", buckets=_FRACTIONS)
        self._novelty = histogram("novelty", "Novelty in these decisions, where it was measured", buckets=_FRACTIONS)
        self.batch_traces = histogram("batch_traces", "Traces placed and committed together", buckets=_SIZES)
        self.pass_texts = histogram("pass_texts", "Texts in a pass through the engine", buckets=_SIZES)
        self.pass_tokens = histogram("pass_tokens", "Tokens in a pass, without padding", buckets=_TOKENS)
        about = "Time from sending a message to its delivery, if the message says when it was sent"
        self._queue_wait_s = seconds("queue_wait_seconds", about, ("queue",))
        self._processing_s = seconds("processing_seconds", "Time from a message's delivery to its decision's publication")
        self.look_up_s = seconds("look_up_seconds", "Time to look a group up in the ledger")
        self.checks_s = seconds("checks_seconds", "Time for all checks of a trace")
        self.pass_wait_s = seconds("pass_wait_seconds", "Time from a text's look-up until its pass through the engine begins")
        self.pass_s = seconds("pass_seconds", "Time for a pass through the engine")
        self.finish_s = seconds("finish_seconds", "Time to place a batch in the novelty log, judge it and commit it")

    def _define_gauges(self) -> None:
        gauge = partial(Gauge, namespace=_PREFIX, registry=self.registry)
        self._info = Info(_PREFIX, "Version, settings and embedder of the worker", registry=self.registry)
        self.ready = gauge("ready", "1 if the worker receives messages")
        self.degraded = gauge("degraded", "1 if there is no embedder though settings ask for one, so that every novelty is 0.5")
        self.in_flight = gauge("in_flight", "Messages in flight")
        about = "Time in flight of the oldest message whose last attempt failed; 0 if there is none"
        self.waited_s = gauge("waiting_seconds", about)
        self.texts_in_flight = gauge("texts_in_flight", "Texts that wait for the engine, or are in it")
        self.window_entries = gauge("window_entries", "Entries of the novelty log in the worker's mirror")
        self.mirror_lag_s = gauge("mirror_lag_seconds", "Time since the mirror was last at the log's end")
        # These gauges describe what workers share, so all workers show the same values.
        self.work_age_s = gauge("work_age_seconds", "Time since a periodic task last succeeded", ("work",))
        self.backlog_age_s = gauge("backlog_age_seconds", "Time since the backlog was last measured")
        self._waiting = gauge("queue_messages", "Messages on a queue, or unread decisions", ("queue", "kind"))
        about = "Messages on a queue as a fraction of its limit, beyond which clients are refused"
        self._submissions_used = gauge("submissions_used_ratio", about, ("queue",))
        self._full = gauge("results_full", "1 if workers wait because a queue of decisions is full", ("queue",))
        about = "Unread decisions as a fraction of queues.results_limit, or on Redis of its bytes if that is more"
        self._results_used = gauge("results_used_ratio", about, ("queue",))
        self._submitted = gauge("submitted", "Submissions since the ledger began")
        self._pending = gauge("pending", "Submissions in the ledger that have not ended")
        self._oldest_pending_s = gauge("oldest_pending_seconds", "Time since the oldest pending trace was last sent or resent")
        about = "How often a submission was dead-lettered since the ledger began, by reason"
        self._dead_lettered = gauge("dead_lettered", about, ("reason",))
        about = "Fraction of its maxmemory that a Redis uses; 0 without a limit"
        self._redis_used = gauge("redis_memory_used_ratio", about, ("server",))
        about = "Bytes that a part takes in a Redis, estimated from a sample; other is the rest"
        self._redis_bytes = gauge("redis_bytes", about, ("server", "part"))
        self._evicted = gauge("redis_evicted_keys", "Keys that a Redis has evicted since it started", ("server",))
        self._evicts = gauge("redis_evicts", "1 if a Redis evicts keys when its memory is full", ("server",))
        about = "Number of other shortcomings of a Redis, which doctor names"
        self._shortcomings = gauge("redis_shortcomings", about, ("server",))
        self._blocked = gauge("broker_blocked", "1 if RabbitMQ accepts no messages, because it is short of memory or disk")
        # Until the first measurement these are NaN, because 0 would mean that nothing waits.
        for unread in (self._submitted, self._pending, self._oldest_pending_s):
            unread.set(math.nan)
        self.set_info()

    def counted_as(self, domain: str) -> str:
        """Return the label of a domain: its name if this process counts it by name, otherwise :data:`UNNAMED_DOMAIN`."""
        return domain if domain in self._domains else UNNAMED_DOMAIN

    def set_info(self, settings: str = "", **embedder: str) -> None:
        """Show the digest of the settings, and the embedder's name, engine and space; those that are not given are empty."""
        self._shown = {"settings": settings, "embedder": "", "engine": "", "space": "", **embedder}
        self._info.info({"version": version("kp-scorer"), **self._shown})

    def set_backlog(self, backlog: Backlog) -> None:
        """Show the backlog that was just read."""
        for name, count in backlog.submissions.items():
            self._waiting.labels(name, "submissions").set(count)
        for name, used in backlog.submissions_used.items():
            self._submissions_used.labels(name).set(used)
        unread = backlog.unread
        for name, count in unread.counts.items():
            self._waiting.labels(name, "decisions").set(count)
            self._full.labels(name).set(name in unread.full)
            if name in unread.rings:
                self._decisions_dropped.labels(name)
            else:
                self._results_used.labels(name).set(unread.used(name))
        self._submitted.set(backlog.counts.submitted)
        self._pending.set(backlog.counts.pending)
        self._oldest_pending_s.set(backlog.oldest_pending_s)
        for reason, count in backlog.dead_lettered.items():
            self._dead_lettered.labels(reason).set(count)
        for name, server in backlog.servers.items():
            self._redis_used.labels(name).set(_known(server.memory_used))
            self._evicted.labels(name).set(_known(server.evicted_keys))
            self._evicts.labels(name).set(bool(server.evicts))
            self._shortcomings.labels(name).set(len(server.others))
        for name, parts in backlog.used_by_part.items():
            for part, size_bytes in parts.items():
                self._redis_bytes.labels(name, part).set(size_bytes)
        self._blocked.set(bool(backlog.blocked))

    def count_delivery(self, queue: str, deliveries: int) -> None:
        """Count a delivery of a message that has had this many ``deliveries``, this one included."""
        self._deliveries.labels(queue).inc()
        if deliveries > 1:
            self._redeliveries.inc()

    def count_dead_letter(self, _: Reason) -> None:
        """Count a dead letter that is stored, for the report: metrics show the ledger's count, which outlives the process."""
        self._dead_letters.inc()

    def count_dropped(self, reason: Reason, count: int) -> None:
        """Count dead letters that made room for others."""
        self._dropped.labels(reason).inc(count)

    def count_decisions_dropped(self, queue: str, count: int) -> None:
        """Count decisions that a full queue or stream dropped to make room for newer ones."""
        self._decisions_dropped.labels(queue).inc(count)

    def count_decided(self, decision: Decision) -> None:
        """Count a decision that was just made. One that is only published again must not be counted here."""
        domain = self.counted_as(decision.domain)
        for each in bins_of(decision):
            self._values[domain, *each].inc()
        for check in decision.checks:
            self._findings.labels(check.name).inc(sum(check.kinds.values()))
            if check.failure:
                self._failures.labels(check.name, check.failure).inc()

    def count_published(self, decision: Decision, queue: str, queued_s: float | None, in_flight_s: float) -> None:
        """Count a decision that is published; ``queued_s`` is None if nothing says when its message was sent."""
        self._decisions.labels(decision.outcome, self.counted_as(decision.domain)).inc()
        for override in decision.overrides:
            self._overrides.labels(override.name).inc()
        self._score.observe(decision.score)
        if decision.novelty.source in ("embedding", "empty_cache"):
            self._novelty.observe(decision.dimensions.novelty)
        self._processing_s.observe(in_flight_s)
        if queued_s is not None:
            self._queue_wait_s.labels(queue).observe(queued_s)

    def report(self, node: str, not_ready: Sequence[str], full: Collection[str], failing: Mapping[str, str]) -> WorkerReport:
        """Return the report that the worker ``node`` stores in Redis for ``stats`` and ``doctor``.

        ``full`` names the queues without room. ``failing`` has the error of each kind of work that failed at its last attempt.
        """
        decisions: dict[Outcome, dict[str, int]] = {}
        for outcome, domain in self._outcomes:
            if count := _sum(self._decisions.labels(outcome, domain), "_total"):
                decisions.setdefault(outcome, {})[domain] = int(count)
        return WorkerReport(
            node=node,
            not_ready=tuple(not_ready),
            full=tuple(full),
            failing=dict(failing),
            settings=self._shown["settings"],
            space=self._shown["space"],
            embedder=f"{self._shown['embedder']} {self._shown['engine']}".strip(),
            in_flight=int(_sum(self.in_flight)),
            window_entries=int(_sum(self.window_entries)),
            decisions=decisions,
            dead_letters=int(_sum(self._dead_letters, "_total")),
            redeliveries=int(_sum(self._redeliveries, "_total")),
            queued=_timed(self._queue_wait_s),
            held=_timed(self._processing_s),
            embedded=_timed(self.pass_s),
        )


def _sum(metric: Collector, suffix: str = "") -> float:
    """Return the sum of a metric's samples with this suffix, over all labels."""
    return sum(sample.value for family in metric.collect() for sample in family.samples if sample.name.endswith(suffix))


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _timed(histogram: Histogram) -> Timing:
    return Timing(count=int(_sum(histogram, "_count")), seconds=_sum(histogram, "_sum"))
