"""Measures how well a pinned set of plain texts finds the tasks that it holds, asked in other words, on the real traces.

The set holds the objectives of half of the tasks, drawn at random; runs of the other half must not be found. A run is found if
its similarity exceeds a threshold, which is set so that, over all draws, one in a thousand runs of the other half is found.
Objectives that differ only in numbers, or share a user, a reservation or a quoted name, count as one task.

- ``compares``: the vector with which each text is compared: the one that a run has anyway (``trace``), or that of its
  ``objective`` alone.
- ``same``, ``polite``, ``synonyms``, ``reordered``: the share of the set's tasks whose run is found if it asks in the set's
  words, politely, with synonyms, or with both and the last part in front. Numbers stay as they are.
- ``beyond``: the threshold.

A second table shows the cost of comparing objectives with ``--entries`` entries of 384 dimensions, on one thread, as in a
worker. The entries are ``of`` texts, the sentences of the traces, or of noise, which is the worst case. ``compare_ms`` is the
processor time for each trace in a ``group``, the median of the repeats; ``read_s`` is the time to read the set from Redis, and
``redis_bytes`` its size there.
"""

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Final

import numpy as np
from kp_scorer.embedding.embedder import Embedder, TokenizedText, Vectors
from kp_scorer.novelty.pins import PinnedSearch, PinnedSet
from kp_scorer.settings import load_settings
from kp_scorer.store import Store
from kp_scorer.trace import ReasoningTrace
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from tests.benchmarks.common import (
    RECIPES,
    Row,
    arguments,
    asking,
    batches,
    own_redis,
    real,
    real_embedder,
    report,
    say,
    seconds_of,
    tasks_of,
)

_SYNONYMS: Final = """
find:locate write:create function:routine list:enumerate show:display return:deliver check:verify buy:purchase
want:wish need:require change:alter modify:adjust cancel:revoke upcoming:planned order:purchase help:assistance
refund:reimbursement issue:problem issues:problems unable:incapable exchange:swap looking:searching price:cost
lower:smaller city:town question:query claim:statement decide:determine whether:if supported:backed print:output
refuted:disproved given:supplied string:text number:count numbers:values sum:total convert:translate remove:delete
update:refresh search:look get:fetch answer:reply user:person customer:client phone:telephone flight:trip
flights:trips name:title names:titles different:distinct most:largest many:numerous large:big small:little
first:initial last:final agent:representative insist:demand upset:angry currently:now also:additionally
reservation:booking booked:reserved package:parcel item:article items:articles analyze:examine contents:material
movie:film film:movie people:persons created:made produced:directed born:delivered pack:bundle size:dimension
color:colour women:ladies long:lengthy easy:simple quick:fast calculate:compute elements:entries element:entry
array:sequence contains:includes contain:include positive:nonnegative only:just each:every file:document
files:documents directory:folder usage:use ascending:rising descending:falling level:amount please:kindly
resolved:solved experiencing:having send:transmit make:place receive:get considered:regarded the:that
"""
_SYNONYM_OF: Final = dict(pair.split(":") for pair in _SYNONYMS.split())


def _polite(text: str) -> str:
    return f"Hello! I hope you are well. Could you please help me with the following? {text} Thank you very much in advance."


def _with_synonyms(text: str) -> str:
    return re.sub(r"[A-Za-z]+", lambda word: _SYNONYM_OF.get(word[0].lower(), word[0]), text)


def _reordered(text: str) -> str:
    *parts, last = re.split(r"(?<=[.!?\n])\s+", text.strip())
    if not parts:
        *parts, last = re.split(r",\s+", text)
    return _polite(" ".join([last, _with_synonyms(" ".join(parts))]))


_REWORDED: Final[Mapping[str, Callable[[str], str]]] = {
    "same": str,
    "polite": _polite,
    "synonyms": _with_synonyms,
    "reordered": _reordered,
}

_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+|\n+")
_IDENTIFIER: Final = re.compile(r"\b[a-z]+_[a-z]+_\d{4}\b|\b(?=[A-Z]*\d)[A-Z\d]{6}\b|'[A-Z][a-z]+'")
"""A user, a reservation or a quoted name: tasks that share one are often the same task, worded by different benchmarks."""
_FALSE_ALARMS: Final = 0.001

Floats = NDArray[np.float32]


def main() -> None:
    options = arguments(__doc__, draws=500, entries=100_000, repeats=21).parse_args()
    # Use one run of each objective.
    traces = list({trace.task.objective: trace for trace in real(required=True)}.values())
    report("pins", _of_recipes(traces, options.draws))
    embedder = real_embedder()
    say("embedding the sentences of all traces")
    sentences = _sentences(embedder, traces)
    asked = np.random.default_rng(1).permutation(_of_plain(embedder, traces))
    for kind in ("texts", "noise"):
        report("pins", _costs(kind, sentences, asked, options.entries, options.repeats))
    report("pins", [_way_to_redis(sentences, options.entries)])


def _of_recipes(traces: Sequence[ReasoningTrace], draws: int) -> Iterator[Row]:
    tasks = _joined_tasks(traces)
    for name, changed in RECIPES.items():
        say(name)
        embedder = real_embedder(changed)
        for compares, similarities in _similarities(embedder, traces):
            yield {"by": name, "compares": compares, **_shares(similarities, tasks, draws)}


def _sentences(embedder: Embedder, traces: Sequence[ReasoningTrace]) -> Vectors:
    texts = (text for trace in traces for text in (trace.task.objective, *(step.content or "" for step in trace.steps)))
    sentences = dict.fromkeys(part.strip() for text in texts for part in _SENTENCE_END.split(text) if 20 < len(part) < 300)
    return _embedded(embedder, embedder.tokenize_all(list(sentences), plain=True))


def _set_of(kind: str, sentences: Vectors, entries: int) -> PinnedSet:
    """Make a set of ``entries``: the sentences, repeated with small changes; or noise, which is like no text."""
    chance = np.random.default_rng(0)
    vectors = chance.standard_normal((entries, 384), np.float32)
    if kind == "texts":
        vectors = np.resize(sentences, vectors.shape) + 0.01 * vectors
    return PinnedSet("texts", list(map(str, range(entries))), vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _costs(kind: str, sentences: Vectors, asked: Vectors, entries: int, repeats: int) -> Iterator[Row]:
    with threadpool_limits(1, "blas"):
        search = PinnedSearch(_set_of(kind, sentences, entries))
        for group in (1, 8, 32):
            times = []
            for repeat in range(repeats):
                some = np.roll(asked, repeat * group, axis=0)[:group]
                times.append(seconds_of(partial(search.nearest, some), time.thread_time) * 1_000 / group)
            yield {"entries": entries, "of": kind, "group": group, "compare_ms": median(times)}


def _way_to_redis(sentences: Vectors, entries: int) -> Row:
    pinned = _set_of("texts", sentences, entries)
    with own_redis() as url, Store.open(load_settings({"redis.url": url})) as store:
        sets = store.pinned_sets("space")
        sets.replace("tasks", pinned, check_room=lambda: None)
        read_s = seconds_of(lambda: sets.read("tasks"))
        (info,) = store.all_pinned_sets()
        return {"entries": entries, "read_s": read_s, "redis_bytes": info["bytes"]}


def _similarities(embedder: Embedder, traces: Sequence[ReasoningTrace]) -> Iterator[tuple[str, Mapping[str, Floats]]]:
    """Yield each kind of vector to compare and, by rewording, the similarities of runs (rows) to objectives (columns)."""
    texts = _of_plain(embedder, traces)
    runs = {name: [asking(trace, reword(trace.task.objective)) for trace in traces] for name, reword in _REWORDED.items()}
    yield "trace", {name: _of_traces(embedder, some) @ texts.T for name, some in runs.items()}
    yield "objective", {name: _of_plain(embedder, some) @ texts.T for name, some in runs.items()}


def _shares(similarities: Mapping[str, Floats], tasks: Sequence[int], draws: int) -> Row:
    chance, names = random.Random(0), sorted(set(tasks))
    others: list[Floats] = []
    runs: dict[str, list[Floats]] = {name: [] for name in similarities}
    for _ in range(draws):
        drawn = set(chance.sample(names, len(names) // 2))
        is_in = np.array([task in drawn for task in tasks])
        others.append(similarities["same"][~is_in][:, is_in].max(axis=1))
        for name, some in similarities.items():
            runs[name].append(some[is_in][:, is_in].max(axis=1))
    beyond = float(np.quantile(np.concatenate(others), 1 - _FALSE_ALARMS, method="higher"))
    return {"beyond": beyond, **{name: float((np.concatenate(some) > beyond).mean()) for name, some in runs.items()}}


def _joined_tasks(traces: Sequence[ReasoningTrace]) -> list[int]:
    """Return a number for each trace, equal for traces that share a mark, directly or through others."""
    tasks: dict[str, int] = {}
    groups = tasks_of(traces)
    for number, (trace, group) in enumerate(zip(traces, groups, strict=True)):
        objective = trace.task.objective
        marks = {re.sub(r"[\W\d]+", "", objective), group, *_IDENTIFIER.findall(objective)}
        joined = {tasks[mark] for mark in marks & tasks.keys()}
        tasks |= dict.fromkeys([*marks, *(mark for mark, task in tasks.items() if task in joined)], number)
    return [tasks[group] for group in groups]


def _of_traces(embedder: Embedder, traces: Sequence[ReasoningTrace]) -> Vectors:
    return _embedded(embedder, embedder.tokenize_all([embedder.recipe.text(trace) for trace in traces]))


def _of_plain(embedder: Embedder, traces: Sequence[ReasoningTrace]) -> Vectors:
    return _embedded(embedder, embedder.tokenize_all([trace.task.objective for trace in traces], plain=True))


def _embedded(embedder: Embedder, texts: Sequence[TokenizedText]) -> Vectors:
    return np.concatenate([embedder.embed_tokenized(batch) for batch in batches(texts, 32)])


if __name__ == "__main__":
    main()
