"""What the benchmarks share: traces, a Redis of their own, and how results are written."""

import json
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import redis
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.embedding import Embedder, select_embedder
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.tokens import Tokens
from kp_scorer.settings import RedisSettings, load_settings
from kp_scorer.store.connection import connect
from kp_scorer.store.local_redis import embedded_redis
from kp_scorer.trace import TRACE_ID_PREFIX, ReasoningTrace

from tests.support.paths import REFERENCE_TRACES
from tests.support.traces import sample_traces

Item = TypeVar("Item")
Cell = str | int | float | bool
Row = dict[str, Cell]


class Workload(NamedTuple):
    """Traces under a name."""

    name: str
    traces: list[ReasoningTrace]


def samples(limit: int | None = None) -> Workload:
    """The shipped samples: short texts."""
    return Workload("samples", [decode_trace(trace, Limits()) for trace in sample_traces()[:limit]])


def real(limit: int | None = None) -> Workload | None:
    """The real traces, long texts, where ``REFERENCE_TRACES`` has them."""
    file = REFERENCE_TRACES / "traces.jsonl"
    if not file.is_file():
        return None
    lines = file.read_text("utf-8").splitlines()[:limit]
    return Workload("real", [decode_trace(json.loads(line), Limits()) for line in lines])


class Texts(NamedTuple):
    """Texts of about one length, and the tokens of each that count."""

    name: str
    texts: list[str]
    lengths: list[int]

    @property
    def tokens(self) -> float:
        """Tokens of a text, on average."""
        return round(sum(self.lengths) / len(self.lengths), 1)


def texts_of_every_length(limit: int) -> list[Texts]:
    """Short, medium and long texts, ``limit`` of each: a trace's objective, its first 1,000 characters, and all of it."""
    model = find_model("")
    assert model, "the package with the default weights is not installed"
    tokens = Tokens(model.tokenizer)
    traces = (real(limit) or samples(limit)).traces
    cuts = {
        "short": [trace.task.objective for trace in traces],
        "medium": [trace.embedding_text[:1_000] for trace in traces],
        "long": [trace.embedding_text for trace in traces],
    }
    return [Texts(name, texts, [len(ids) for ids in tokens.of(texts)]) for name, texts in cuts.items()]


def as_new(traces: Sequence[ReasoningTrace]) -> list[ReasoningTrace]:
    """The same texts as traces not seen before: ids of their own, and an agent id that makes no two contents the same."""
    return [
        trace.model_copy(
            update={
                "id": f"{TRACE_ID_PREFIX}{uuid.uuid4()}",
                "metadata": trace.metadata.model_copy(update={"agent_id": uuid.uuid4().hex}),
            }
        )
        for trace in traces
    ]


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Cut into consecutive batches; the last may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def real_embedder() -> Embedder:
    """The embedder a worker would use; ``KP_EMBEDDING_…`` variables choose another."""
    embedder = select_embedder(load_settings({"embedding.required": True}).embedding)
    assert embedder, "KP_EMBEDDING_EMBEDDER=none leaves nothing to measure"
    return embedder


@contextmanager
def own_redis() -> Iterator[str]:
    """Run an empty Redis with its append-only file in a temporary directory; yield its URL."""
    with tempfile.TemporaryDirectory(prefix="kp-benchmark-") as directory, embedded_redis(Path(directory)) as url:
        yield url


def redis_of(url: str) -> redis.Redis:
    """A connection as a worker makes it, but patient: sizing up a large log takes Redis seconds."""
    return connect(RedisSettings(url=url, timeout_s=120.0))


def say(text: str) -> None:
    """Report progress."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def emit(row: Mapping[str, Cell]) -> None:
    """Write one result as a line of JSON."""
    sys.stdout.write(f"{json.dumps(row)}\n")
    sys.stdout.flush()


def show_table(rows: Sequence[Mapping[str, Cell]], columns: Mapping[str, str]) -> None:
    """Write a table for people. ``columns`` maps a row's fields to headings; what a row lacks stays empty."""
    lines = [list(columns.values())]
    lines += [[_shown(row[name]) if name in row else "" for name in columns] for row in rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    say("")
    for line in lines:
        say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
