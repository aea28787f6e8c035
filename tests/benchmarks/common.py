"""The code that the benchmarks share: arguments, traces, embedders, a Redis of their own, clocks, and the output of results."""

import argparse
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np
import psutil
import redis
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding.embedder import Embedder, Vectors
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.select import select_embedder
from kp_scorer.embedding.tokenizer import Tokens
from kp_scorer.limits import Limits
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import WorkerSettings
from kp_scorer.settings.server_sections import RedisSettings
from kp_scorer.store.connection import connect
from kp_scorer.trace import ReasoningTrace

from tests.support.paths import REFERENCE_TRACES
from tests.support.servers import embedded_default
from tests.support.traces import new_id, sample_traces

Item = TypeVar("Item")
Cell = str | int | float | bool
Row = dict[str, Cell]

MB: Final = 1_000_000
BATCH: Final = WorkerSettings().batch_size
CHARS: Final = {"short": 0, "medium": 1_000, "long": 10**9}
"""The maximum length of a text in characters, by name. The objective is never cut, so 0 leaves only that."""

RECIPES: Final = {
    "trace": {"novelty.recipe": "trace"},
    "asked_and_did": {"novelty.recipe": "asked_and_did"},
    "words": {"embedding.embedder": "words"},
}
"""The settings that benchmarks of novelty compare, by name."""


def arguments(description: str | None, **defaults: float | list[int]) -> argparse.ArgumentParser:
    """Return a parser with a benchmark's docstring as its help, and an option for each default, a number or a list of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"type": int, "nargs": "*"} if isinstance(default, list) else {"type": type(default)}
        parser.add_argument(f"--{name}", default=default, metavar="N", help=f"(default: {default})", **kind)
    return parser


def samples(limit: int | None = None) -> list[ReasoningTrace]:
    """Return the shipped samples, whose texts are short."""
    return [decode_trace(trace, Limits()) for trace in sample_traces()[:limit]]


def real(limit: int | None = None, *, required: bool = False) -> list[ReasoningTrace]:
    """Return the real traces, whose texts are long, or none if ``REFERENCE_TRACES`` has none and they are not ``required``."""
    file = REFERENCE_TRACES / "traces.jsonl"
    if not file.is_file():
        assert not required, f"there are no real traces in {REFERENCE_TRACES}; name their folder with REFERENCE_TRACES"
        return []
    lines = file.read_text("utf-8").splitlines()[:limit]
    return [decode_trace(json.loads(line), Limits()) for line in lines]


def typical(limit: int | None = None) -> list[ReasoningTrace]:
    """Return the real traces, or the samples if there are none."""
    return real(limit) or samples(limit)


def tasks_of(traces: Iterable[ReasoningTrace]) -> list[str]:
    """Return the task of each real trace, by ``groups.json``; a trace in no group is a task of its own."""
    groups = json.loads((REFERENCE_TRACES / "groups.json").read_text("utf-8"))
    task_of = {trace_id: task for task, trace_ids in groups.items() for trace_id in trace_ids}
    return [task_of.get(trace.id, trace.id) for trace in traces]


def asking(trace: ReasoningTrace, objective: str) -> ReasoningTrace:
    """Return the same trace with another objective."""
    return trace.model_copy(update={"task": trace.task.model_copy(update={"objective": objective})})


def cut(trace: ReasoningTrace, chars: int) -> ReasoningTrace:
    """Return a trace with an embedding text of at most ``chars`` characters, but always with its whole objective."""
    left, steps = chars - len(trace.task.objective), []
    for step in trace.steps:
        content = (step.content or "")[: max(0, left)]
        left -= len(content)
        steps.append(step.model_copy(update={"content": content or None}))
    return trace.model_copy(update={"steps": tuple(steps)})


def as_new(traces: Sequence[ReasoningTrace]) -> list[ReasoningTrace]:
    """Return the same traces with new ids, and with contents that no other trace has."""
    metadata = [trace.metadata.model_copy(update={"agent_id": uuid.uuid4().hex}) for trace in traces]
    return [trace.model_copy(update={"id": new_id(), "metadata": each}) for trace, each in zip(traces, metadata, strict=True)]


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def default_tokens() -> Tokens:
    model = find_model("")
    assert model, "the package with the default weights is not installed"
    return Tokens(model.tokenizer)


def lengths_of(texts: Sequence[str]) -> list[int]:
    """Return the number of tokens that the default model reads of each text."""
    tokens = default_tokens()
    return [len(ids) for ids, _ in tokens.rows(texts)]


def unit_vectors(chance: np.random.Generator, count: int, dimensions: int = 384) -> Vectors:
    vectors = chance.standard_normal((count, dimensions), np.float32)
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def real_embedder(changed: Mapping[str, object] = MappingProxyType({})) -> Embedder:
    """Return the embedder that a worker would use with these settings; ``KP_EMBEDDING_…`` variables choose another."""
    settings = load_settings(changed)
    embedder = select_embedder(settings.embedding, settings.novelty.recipe)
    assert embedder, "there is no embedder to measure"
    return embedder


@contextmanager
def own_redis() -> Iterator[str]:
    """Run a Redis with an append-only file, using the tests' server (``TEST_REDIS_SERVER``), and yield its URL."""
    with tempfile.TemporaryDirectory(prefix="kp-benchmark-") as directory, embedded_default(Path(directory)) as url:
        yield url


def redis_of(url: str) -> redis.Redis:
    """Return a connection such as a worker's, but with a timeout long enough for a log of a million entries."""
    return connect(RedisSettings(url=url), 120.0)


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that work takes, by the wall clock or another clock."""
    started = clock()
    work()
    return clock() - started


def embed_seconds(embedder: Embedder, texts: Sequence[str]) -> float:
    """Return the seconds that the bare engine takes for texts, in batches as large as a worker's."""
    return seconds_of(lambda: [embedder.embed(batch) for batch in batches(texts, BATCH)])


def seconds_in_turns(ways: Mapping[str, Callable[[Sequence[Item]], float]], items: Sequence[Item]) -> dict[str, float]:
    """Process all items in each way, taking turns batch by batch; return the sum of the seconds that each way returns."""
    seconds = dict.fromkeys(ways, 0.0)
    for batch in batches(items, BATCH):
        for name, way in ways.items():
            seconds[name] += way(batch)
    return seconds


def cpu_seconds(process: psutil.Process | None = None) -> float:
    """Return the processor time that a process has used, by default this one."""
    times: Any = (process or psutil.Process()).cpu_times()
    return float(times.user + times.system)


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def emit(row: Row) -> None:
    sys.stdout.write(f"{json.dumps(row)}\n")
    sys.stdout.flush()


def report(benchmark: str, rows: Iterable[Row]) -> None:
    """Write each row to stdout as JSON when it comes, and finally all rows to stderr as a table."""
    written = []
    for row in rows:
        emit({"benchmark": benchmark, **row})
        written.append(row)
    show_table(written)


def show_table(rows: Sequence[Row]) -> None:
    """Write rows to stderr as a table."""
    names = list({name: None for row in rows for name in row})
    lines = [names, *([_cell_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(names))]
    say("")
    for line in lines:
        say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell_text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
