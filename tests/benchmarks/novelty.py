"""Measures how well novelty tells new tasks from repeats, for each recipe and for words, on the real traces in file order.

Each trace is compared with all before it, as one worker would compare them; similarities are rounded to 1e-5. The first trace
of all is left out. Unless it is defined otherwise, a figure is an area under the ROC curve: of all pairs of a trace that should
be newer and one that should not, the share in which it is newer. A tie counts as half a pair.

- ``separated``: the first traces of tasks against repeats, by the tasks in ``groups.json`` beside the traces.
- ``by_objective``: the same, where a trace is a repeat if its objective came before.
- ``reworded``: ``separated`` for the traces with a user, where the objective is what the user first says, in other words in
  every attempt; ``generic``: ``by_objective``, where all traces are given the same objective.
- ``edited``: first traces as in ``by_objective``, against slightly edited copies of all traces, each compared with its
  original.
- ``approaches``: pairs of attempts at one objective that call different tools and end differently, against pairs that differ
  in neither.
- ``of_firsts``, ``of_repeats``: the mean novelty of first traces and of repeats in ``separated``; ``firsts_below``,
  ``repeats_below``: the shares of them with a novelty below 0.105.
- ``ratio``: the rate at which the bare embedder embeds traces, in multiples of the rate for the recipe `trace`. The embedders
  take turns batch by batch, and the figure is the median of the passes.

A second table shows what is accepted by a gate that takes the fifth of each domain with the highest scores, for each
``novelty.against`` and over all shuffled orders together. Here a task is an objective, a success has ``metadata.success`` and a
confidence of 0.5 or more, and an accepted trace is a copy if another one of its task was accepted before.

- ``late``: of the tasks that fail first and succeed later, the share whose first success is accepted; ``late_tasks``: the
  number of these tasks in an order.
- ``at_once``: of the tasks whose first run succeeds, the share whose first run is accepted.
- ``covered``: of the tasks with a success, the share with an accepted one.
- ``successes``, ``copies``: the shares of successes and of copies among the accepted traces.

For comparison, the table has rankings that know nothing of other traces' contents, each taken both for the novelty and for the
score: the ``position`` in the order, where earlier is more; the ``length`` in characters; ``success``; and the ``source``, by
framework, at its best: the share of first traces, or of successes, among its traces. Ties are in random order.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from statistics import median
from typing import Final

import numpy as np
from kp_scorer.embedding.embedder import Embedder, Vectors
from kp_scorer.trace import ReasoningTrace, Step

from tests.benchmarks.common import (
    BATCH,
    RECIPES,
    Row,
    arguments,
    asking,
    batches,
    embed_seconds,
    real,
    real_embedder,
    report,
    say,
    seconds_in_turns,
    tasks_of,
)
from tests.benchmarks.gate import Floats, Gate, Rank, area, is_repeat

_LOW: Final = 0.105

Ranks = dict[tuple[str, str], Rank]
"""Rankings of traces, by the text that is embedded and by the traces with which each is compared."""


def main() -> None:
    options = arguments(__doc__, repeats=3, orders=200).parse_args()
    traces = real(required=True)
    gate, ranks = Gate(traces), Ranks()
    report("novelty", _of_recipes(traces, gate, ranks, options.repeats))
    ranks |= {(name, ""): rank for name, rank in gate.without_novelty().items()}
    chance = np.random.default_rng(1)
    orders = [chance.permutation(len(traces)) for _ in range(options.orders)]
    report("novelty", ({"by": by, "against": against, **gate.row(rank, orders)} for (by, against), rank in ranks.items()))


def _of_recipes(traces: Sequence[ReasoningTrace], gate: Gate, ranks: Ranks, repeats: int) -> Iterator[Row]:
    """Yield how well each recipe tells tasks apart; add the gate's rankings by it to ``ranks``."""
    embedders = {name: real_embedder(changed) for name, changed in RECIPES.items()}
    ways = {name: partial(_embed_seconds, embedder) for name, embedder in embedders.items()}
    passes = [seconds_in_turns(ways, traces) for _ in range(repeats)]
    for name, embedder in embedders.items():
        say(name)
        vectors = _vectors(embedder, traces)
        yield {
            "by": name,
            **_of_tasks(traces, vectors),
            **_of_changed(embedder, traces, vectors),
            "ratio": median(each["trace"] / each[name] for each in passes),
        }
        ranks |= {(name, against): gate.by_score(vectors, against) for against in ("all", "succeeded")}


def _embed_seconds(embedder: Embedder, traces: Sequence[ReasoningTrace]) -> float:
    return embed_seconds(embedder, list(map(embedder.recipe.text, traces)))


def _of_tasks(traces: Sequence[ReasoningTrace], vectors: Vectors) -> Row:
    novelty, repeated = _novelty(vectors), is_repeat(tasks_of(traces))
    firsts, repeats = novelty[~repeated], novelty[repeated]
    return {
        "separated": area(firsts, repeats),
        "of_firsts": float(firsts.mean()),
        "of_repeats": float(repeats.mean()),
        "repeats_below": float((repeats < _LOW).mean()),
        "firsts_below": float((firsts < _LOW).mean()),
    }


def _of_changed(embedder: Embedder, traces: Sequence[ReasoningTrace], vectors: Vectors) -> Row:
    repeated = is_repeat([trace.task.objective for trace in traces])
    novelty = _novelty(vectors)
    copies = [1 - (vectors * _vectors(embedder, some)).sum(axis=1) for some in zip(*map(_edited, traces), strict=True)]
    asked = {trace.id: said for trace in traces if (said := _first_said(trace))}
    with_user = [trace for trace in traces if trace.id in asked]
    reworded = _novelty(_vectors(embedder, [asking(trace, asked[trace.id]) for trace in with_user]))
    repeats_of_user = is_repeat(tasks_of(with_user))
    generic = _novelty(_vectors(embedder, [asking(trace, "Complete the task.") for trace in traces]))
    return {
        "by_objective": area(novelty[~repeated], novelty[repeated]),
        "reworded": area(reworded[~repeats_of_user], reworded[repeats_of_user]),
        "generic": area(generic[~repeated], generic[repeated]),
        "edited": area(novelty[~repeated], np.concatenate(copies)),
        "approaches": area(*_distances_of_attempts(traces, vectors)),
    }


def _vectors(embedder: Embedder, traces: Sequence[ReasoningTrace]) -> Vectors:
    texts = list(map(embedder.recipe.text, traces))
    return np.concatenate([embedder.embed(batch) for batch in batches(texts, BATCH)])


def _novelty(vectors: Vectors) -> Floats:
    """Return the novelty of each trace but the first."""
    similarities = vectors @ vectors.T
    return np.array([1 - similarities[place, :place].max() for place in range(1, len(vectors))], np.float64)


def _first_said(trace: ReasoningTrace) -> str | None:
    return next((step.content for step in trace.steps if step.content and step.content.startswith("User:")), None)


def _edited(trace: ReasoningTrace) -> Iterator[ReasoningTrace]:
    """Yield copies: with steps shuffled, every fourth dropped, or cut in half; with other digits; without a word in seven."""
    chance, steps = random.Random(trace.id), trace.steps
    yield _with_steps(trace, chance.sample(steps, len(steps)))
    yield _with_steps(trace, [step for place, step in enumerate(steps) if place % 4] or steps)
    yield _with_steps(trace, steps[: max(1, len(steps) // 2)])
    yield _with_texts(trace, lambda text: re.sub(r"\d", lambda _: str(chance.randrange(10)), text))
    yield _with_texts(trace, lambda text: " ".join(word for word in text.split(" ") if chance.random() > 1 / 7))


def _with_steps(trace: ReasoningTrace, steps: Sequence[Step]) -> ReasoningTrace:
    return trace.model_copy(update={"steps": tuple(steps)})


def _with_texts(trace: ReasoningTrace, edit: Callable[[str], str]) -> ReasoningTrace:
    steps = [step.model_copy(update={"content": edit(step.content)}) if step.content else step for step in trace.steps]
    return asking(_with_steps(trace, steps), edit(trace.task.objective))


def _distances_of_attempts(traces: Sequence[ReasoningTrace], vectors: Vectors) -> tuple[Floats, Floats]:
    """Return the distances of pairs with one objective: those that differ in tools and success, and those alike in both."""
    tools = [[step.tool and step.tool.name for step in trace.steps if step.type == "tool_call"] for trace in traces]
    distances: tuple[list[float], list[float]] = ([], [])
    for first, second in combinations(range(len(traces)), 2):
        if traces[first].task.objective == traces[second].task.objective:
            is_alike = tools[first] == tools[second]
            if is_alike == (traces[first].metadata.success == traces[second].metadata.success):
                distances[is_alike].append(1 - float(vectors[first] @ vectors[second]))
    return np.array(distances[False]), np.array(distances[True])


if __name__ == "__main__":
    main()
