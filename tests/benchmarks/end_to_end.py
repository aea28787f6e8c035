"""Submissions through a real broker and one worker to published decisions, beside the bare engine and the reference.

They are submitted in portions. The worker is paused while a portion is put on the queue, then decides it at full speed, until
the last decision arrives on its queue. The bare engine embeds the same texts in this process, in batches of the same size, and
the reference engine (where it can run) some of them, so that a machine that slows down for a minute slows all. With
``--in-process`` there is no worker: ``score_traces`` scores the portion as parsed JSON.

- ``texts``: of the whole length, cut to their first 1,000 characters, or the objective alone.
- ``traces_per_s``: submissions decided and published a second; the median of the portions.
- ``engine_traces_per_s``, ``of_engine``: the bare engine's rate on the same texts, and the median share of it.
- ``reference_traces_per_s``, ``ratio``: the reference engine's rate, and the median ratio to it.
- ``cpu_outside_ms``: processor time of the worker for a trace, less that of the bare engine.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from statistics import median
from typing import Final, NamedTuple

from kp_scorer import score_traces
from kp_scorer.embedding.embedder import Embedder
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import WorkerSettings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, batches, cpu_seconds, real_embedder, report, say, seconds_of
from tests.benchmarks.load import Speed, open_bench, traces
from tests.benchmarks.reference_engine import ReferenceEngine, is_available, reference_engine

_BATCH: Final = WorkerSettings().batch_size
_WARM_UP: Final = 3 * _BATCH
_REFERENCE_SHARE: Final = 5
"""The reference gets one in so many texts: it is slow, and its rate is steady."""

_CHARS: Final = {"short": 0, "medium": 1_000, "long": 10**9}
"""Characters of a text at most: only the objective, its beginning, or all of it."""


class Portion(NamedTuple):
    """How fast the worker and the bare engine were, and texts a second of the reference (0 without it)."""

    worker: Speed
    engine: Speed
    reference_per_s: float


def main() -> None:
    parser = arguments(__doc__, traces=2_000, portion=192)
    parser.add_argument("--texts", choices=list(_CHARS), default="long", help="how long the texts are (default: long)")
    parser.add_argument("--in-process", action="store_true", help="score without a worker")
    options = parser.parse_args()
    embedder = real_embedder()
    with ExitStack() as stack:
        reference = stack.enter_context(reference_engine()) if is_available() else None
        items = [_cut(trace, _CHARS[options.texts]) for trace in traces(_WARM_UP + options.traces)]
        decide = _scorer(items) if options.in_process else stack.enter_context(open_bench()).decide
        decide(items[:_WARM_UP])
        _embed(embedder, reference, items[:_WARM_UP])
        portions = []
        for portion in batches(items[_WARM_UP:], options.portion):
            portions.append(Portion(decide(portion), *_embed(embedder, reference, portion)))
            say(f"{len(portions)}: {portions[-1].worker.per_s:.1f}/s, engine {portions[-1].engine.per_s:.1f}/s")
    row: Row = {"texts": options.texts, "traces": options.traces, "engine": embedder.engine}
    report("end_to_end", [row | _summary(portions)])


def _cut(trace: ReasoningTrace, chars: int) -> ReasoningTrace:
    """The same trace with an embedding text of so many characters at most, but always with all of its objective."""
    left, steps = chars - len(trace.task.objective), []
    for step in trace.steps:
        content = (step.content or "")[: max(0, left)]
        left -= len(content)
        steps.append(step.model_copy(update={"content": content or None}))
    return trace.model_copy(update={"steps": tuple(steps)})


def _scorer(items: Sequence[ReasoningTrace]) -> Callable[[Sequence[ReasoningTrace]], Speed]:
    """What scores the next portion of ``items`` in this process."""
    payloads = [trace.model_dump(mode="json", exclude_none=True) for trace in items]
    decisions = score_traces(payloads, load_settings({"embedding.required": True}))
    return lambda portion: _speed(lambda: list(islice(decisions, len(portion))), len(portion))


def _embed(embedder: Embedder, reference: ReferenceEngine | None, items: Sequence[ReasoningTrace]) -> tuple[Speed, float]:
    texts = [trace.embedding_text for trace in items]
    speed = _speed(lambda: [embedder.embed(batch) for batch in batches(texts, _BATCH)], len(texts))
    some = texts[::_REFERENCE_SHARE]
    return speed, len(some) / reference.embed(some).seconds if reference else 0.0


def _speed(work: Callable[[], object], count: int) -> Speed:
    cpu_s = cpu_seconds()
    taken_s = seconds_of(work)
    return Speed(count / taken_s, (cpu_seconds() - cpu_s) / count * 1_000)


def _summary(portions: Sequence[Portion]) -> Row:
    row: Row = {
        "traces_per_s": median(portion.worker.per_s for portion in portions),
        "engine_traces_per_s": median(portion.engine.per_s for portion in portions),
        "of_engine": median(portion.worker.per_s / portion.engine.per_s for portion in portions),
        "cpu_outside_ms": median(portion.worker.cpu_ms - portion.engine.cpu_ms for portion in portions),
    }
    if all(portion.reference_per_s for portion in portions):
        row["reference_traces_per_s"] = median(portion.reference_per_s for portion in portions)
        row["ratio"] = median(portion.worker.per_s / portion.reference_per_s for portion in portions)
    return row


if __name__ == "__main__":
    main()
