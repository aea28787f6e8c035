"""What the benchmarks share: arguments, traces, a Redis of their own, and how results are written."""

import argparse
import json
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import redis
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.embedding.embedder import Embedder
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.select import select_embedder
from kp_scorer.embedding.text_embedder import Tokens
from kp_scorer.ledger.connection import connect
from kp_scorer.local import embedded_redis
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import RedisSettings
from kp_scorer.trace import TRACE_ID_PREFIX, ReasoningTrace

from tests.support.paths import REFERENCE_TRACES
from tests.support.token_ids import ids_of
from tests.support.traces import sample_traces

Item = TypeVar("Item")
Cell = str | int | float | bool
Row = dict[str, Cell]


def arguments(description: str | None, **counts: int) -> argparse.ArgumentParser:
    """A parser whose help is a benchmark's docstring, with an option for each count and its default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"(default: {default})")
    return parser


def samples(limit: int | None = None) -> list[ReasoningTrace]:
    """The shipped samples: short texts."""
    return [decode_trace(trace, Limits()) for trace in sample_traces()[:limit]]


def real(limit: int | None = None) -> list[ReasoningTrace]:
    """The real traces, long texts; none where ``REFERENCE_TRACES`` has none."""
    file = REFERENCE_TRACES / "traces.jsonl"
    if not file.is_file():
        return []
    lines = file.read_text("utf-8").splitlines()[:limit]
    return [decode_trace(json.loads(line), Limits()) for line in lines]


class Texts(NamedTuple):
    """Texts of about one length, and how many tokens of each the model reads."""

    name: str
    texts: list[str]
    lengths: list[int]


def texts_of_every_length(limit: int) -> list[Texts]:
    """Short, medium and long texts, ``limit`` of each: a trace's objective, its first 1,000 characters, and all of it."""
    model = find_model("")
    assert model, "the package with the default weights is not installed"
    tokens = Tokens(model.tokenizer)
    traces = real(limit) or samples(limit)
    cuts = {
        "short": [trace.task.objective for trace in traces],
        "medium": [trace.embedding_text[:1_000] for trace in traces],
        "long": [trace.embedding_text for trace in traces],
    }
    return [Texts(name, texts, [len(ids) for ids in ids_of(tokens, texts)]) for name, texts in cuts.items()]


def as_new(traces: Sequence[ReasoningTrace]) -> list[ReasoningTrace]:
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
    for start in range(0, len(items), size):
        yield items[start : start + size]


def real_embedder() -> Embedder:
    """The embedder a worker would use; ``KP_EMBEDDING_…`` variables choose another."""
    embedder = select_embedder(load_settings({"embedding.required": True}).embedding)
    assert embedder, "KP_EMBEDDING_EMBEDDER=none leaves nothing to measure"
    return embedder


@contextmanager
def own_redis() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kp-benchmark-") as directory, embedded_redis(Path(directory)) as url:
        yield url


def redis_of(url: str) -> redis.Redis:
    """A connection as a worker makes it, with a timeout that a log of a million entries needs."""
    return connect(RedisSettings(url=url, timeout_s=120.0))


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def emit(row: Mapping[str, Cell]) -> None:
    sys.stdout.write(f"{json.dumps(row)}\n")
    sys.stdout.flush()


def report(rows: Sequence[Mapping[str, Cell]]) -> None:
    """Write rows for programs to stdout, and as a table for people to stderr."""
    for row in rows:
        emit(row)
    show_table(rows)


def show_table(rows: Sequence[Mapping[str, Cell]], columns: Collection[str] = ()) -> None:
    """Write a table for people to stderr, with these columns of the rows or with all."""
    names = list(columns) or [name for name in {name: None for row in rows for name in row} if name != "benchmark"]
    lines = [names, *([_cell_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(names))]
    say("")
    for line in lines:
        say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell_text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
