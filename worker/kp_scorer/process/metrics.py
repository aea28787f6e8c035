"""A worker's figures as Prometheus reads them. Nothing is asked of Redis, the broker or the engine while it does."""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kp_scorer.broker.backlog import Backlog
from kp_scorer.process.observer import Figures, Spread
from kp_scorer.process.reporting import Condition

_VERSION: Final = version("kp-scorer")
_PREFIX: Final = "kp_scorer"


class WorkerCollector(Collector):
    """Gives a worker's metrics, as of now."""

    def __init__(self, figures: Callable[[], Figures], condition: Callable[[], Condition]) -> None:
        """Read by calling these, from any thread."""
        self._figures = figures
        self._condition = condition

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        figures, condition = self._figures(), self._condition()
        yield InfoMetricFamily(
            _PREFIX,
            "What the worker is, and what it embeds with",
            {"version": _VERSION, "embedder": "", "engine": "", "space": "", **condition.embedder},
        )
        yield from _of_decisions(figures)
        yield from _of_work(figures)
        yield from _of_condition(condition)
        yield _gauge("backlog_age_seconds", "Since the queues and the ledger were last looked at", condition.backlog_age_s)
        if condition.backlog is not None:
            yield from _of_backlog(condition.backlog)


def _of_decisions(figures: Figures) -> Iterator[Metric]:
    decisions = {labels: float(count) for labels, count in figures.decisions.items()}
    yield _counter("decisions", "Decisions published, by outcome and domain", ("outcome", "domain"), decisions)
    overrides = {(name,): float(count) for name, count in figures.overrides.items()}
    yield _counter("overrides", "Rules that changed a score, by rule", ("override",), overrides)
    letters = {(reason,): float(count) for reason, count in figures.dead_letters.items()}
    yield _counter("dead_letters", "Dead letters kept, by reason", ("reason",), letters)
    yield _histogram("score", "Scores of the decisions published", figures.score)


def _of_work(figures: Figures) -> Iterator[Metric]:
    yield _counter("deliveries", "Messages that came", (), {(): figures.deliveries})
    yield _counter("redeliveries", "Messages that came again", (), {(): figures.redeliveries})
    yield _counter("resends", "Lost submissions that were sent again", (), {(): figures.resends})
    yield _counter("tokens", "Tokens embedded", (), {(): figures.tokens})
    yield _histogram("queue_wait_seconds", "From sending to taking, where a message says when it was sent", figures.queued_s)
    yield _histogram("processing_seconds", "From taking a message to the publication of its decision", figures.held_s)
    yield _histogram("batch_traces", "Traces decided together", figures.batch_traces)
    yield _histogram("look_up_seconds", "Looking a batch up in the ledger", figures.look_up_s)
    yield _histogram("embed_seconds", "Embedding a batch", figures.embed_s)
    yield _histogram("finish_seconds", "Placing a batch in the novelty log, judging and committing it", figures.finish_s)


def _of_condition(condition: Condition) -> Iterator[Metric]:
    yield _gauge("ready", "1 if the worker takes work", not condition.not_ready)
    yield _gauge("degraded", "1 if there is no embedder, so that every novelty is 0.5", not condition.embedder)
    yield _gauge("in_hand", "Messages in hand", condition.in_hand)
    yield _gauge("window_entries", "Entries of the novelty log in the worker's mirror", condition.window_entries)
    yield _gauge("mirror_lag_seconds", "Time since the mirror was last at the log's end", condition.mirror_lag_s)


def _of_backlog(backlog: Backlog) -> Iterator[Metric]:
    """The same on all workers, as it is about what they share."""
    said = "Messages on a queue, or unread decisions"
    waiting = GaugeMetricFamily(f"{_PREFIX}_queue_messages", said, labels=["queue", "kind"])
    for kind, counts in (("submissions", backlog.submissions), ("decisions", backlog.decisions)):
        for name, count in counts.items():
            waiting.add_metric([name, kind], count)
    yield waiting
    full = GaugeMetricFamily(f"{_PREFIX}_results_full", "1 if a queue of decisions takes no more", labels=["queue"])
    for name in backlog.decisions:
        full.add_metric([name], name in backlog.full)
    yield full
    yield _gauge("pending", "Submissions in the ledger that have not ended", backlog.pending)
    yield _gauge("oldest_pending_seconds", "Since the oldest of them was last sent, or sent again", backlog.oldest_pending_s)
    if backlog.redis_used is not None:
        said = "Of the memory that Redis may take, what is taken; 0 without a limit"
        yield _gauge("redis_memory_used_ratio", said, backlog.redis_used)


def _gauge(name: str, explained: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", explained, value=value)


def _counter(name: str, explained: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(f"{_PREFIX}_{name}", explained, labels=labels)
    for label, value in values.items():
        family.add_metric(label, value)
    return family


def _histogram(name: str, explained: str, spread: Spread) -> Metric:
    buckets = [("+Inf" if bound == float("inf") else f"{bound:g}", float(count)) for bound, count in spread.buckets]
    return HistogramMetricFamily(f"{_PREFIX}_{name}", explained, buckets=buckets, sum_value=spread.total)
