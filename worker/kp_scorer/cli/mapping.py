"""A map of traces for ``kp-scorer report --kept``: two dimensions, in which traces that are alike lie together."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from kp_scorer.coverage import Vectors
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.report.phrases import shortened
from kp_scorer.trace import ReasoningTrace

_MOST_POINTS: Final = 500  # The most points of kept runs, and of dropped ones. A page with all of them takes some 2 MB.
_MOST_STEPS: Final = 12

_embedder = cache(WordsEmbedder)


class Point(NamedTuple):
    """A trace on the map, with the texts that a click shows."""

    vector: Vectors
    fields: dict[str, Any]


def point_of(trace: ReasoningTrace, *, is_kept: bool) -> Point:
    """Return the point of a trace."""
    steps = [f"{step.type} {step.tool.name if step.tool else ''} {step.content or ''}" for step in trace.steps[:_MOST_STEPS]]
    more = [f"and {len(trace.steps) - _MOST_STEPS} more"] if len(trace.steps) > _MOST_STEPS else []
    fields = {
        "kept": is_kept,
        "outcome": "succeeded" if trace.metadata.success else "failed",
        "id": trace.id,
        "domain": trace.metadata.task_domain,
        "objective": shortened(trace.task.objective),
        "steps": [*map(shortened, steps), *more],
        "result": shortened(trace.outcome.result_summary),
    }
    embedder = _embedder()
    return Point(embedder.embed([embedder.recipe.text(trace)])[0], fields)


def map_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return points with places along the two directions in which their vectors differ most; of many, only some, evenly chosen.

    The kept ones come last, to be drawn above the others.
    """
    if not points:
        return []
    vectors = np.array([point.vector for point in points])
    centred = vectors - vectors.mean(axis=0)
    _, directions = np.linalg.eigh(centred.T @ centred)
    places = centred @ directions[:, :-3:-1]
    fields = [
        point.fields | {"x": round(x, 4), "y": round(y, 4)} for point, (x, y) in zip(points, places.tolist(), strict=True)
    ]
    groups = [[each for each in fields if each["kept"] == is_kept] for is_kept in (False, True)]
    return [each for group in groups for each in group[:: -(-len(group) // _MOST_POINTS) or 1]]
