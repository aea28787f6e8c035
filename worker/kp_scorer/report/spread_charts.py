"""Charts of how scores and dimensions are spread, and of what thresholds would accept of them."""

from collections.abc import Sequence
from typing import Final

from kp_scorer.analysis.acceptance import THRESHOLDS, lowest_threshold
from kp_scorer.analysis.distribution import BINS
from kp_scorer.analysis.whole import OfDomain
from kp_scorer.report.charts import Spec, chart, count_axis, name_axis, threshold_mark
from kp_scorer.report.words import OUTCOME_WORDS, domain_names

MARKED_SHARES: Final = (0.1, 0.25, 0.5)
"""The shares of a domain's traces for which its threshold is marked."""
_BINNED: Final[Spec] = {
    "x": {
        "field": "from",
        "bin": {"binned": True, "step": 1 / BINS},
        "scale": {"domain": [0, 1]},
        "axis": {"title": None, "format": ".1f", "values": [0, 0.2, 0.4, 0.6, 0.8, 1]},
    },
    "x2": {"field": "to"},
}
_BIN_TOOLTIP: Final = ({"field": "from", "format": ".2f"}, {"field": "to", "format": ".2f"})


def scores_chart(of: OfDomain) -> Spec:
    """How scores are spread, those with each outcome on top of each other, with the threshold among them."""
    rows = [
        {"from": start, "to": end, "outcome": OUTCOME_WORDS[outcome], "order": order, "traces": count}
        for order, (outcome, counts) in enumerate(of.scores.histograms.items())
        for start, end, count in _bins(counts)
    ]
    colours = {"domain": list(OUTCOME_WORDS.values()), "range": [f"var(--{name})" for name in OUTCOME_WORDS]}
    fills = {"domain": list(OUTCOME_WORDS.values()), "range": [f"var(--{name}-fill)" for name in OUTCOME_WORDS]}
    bars = {
        "mark": {"type": "bar", "binSpacing": 1, "strokeWidth": 1},
        "encoding": {
            **_BINNED,
            "y": count_axis("traces", max(map(sum, zip(*of.scores.histograms.values(), strict=True)))),
            "fill": {"field": "outcome", "type": "nominal", "scale": fills, "legend": None},
            "stroke": {"field": "outcome", "type": "nominal", "scale": colours, "legend": None},
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [*_BIN_TOOLTIP, {"field": "outcome"}, {"field": "traces"}],
        },
    }
    return chart(rows, 120, layer=[bars, *threshold_mark(of.scores.threshold)])


def dimension_chart(counts: Sequence[int]) -> Spec:
    """How the values of a dimension are spread."""
    rows = [{"from": start, "to": end, "traces": count} for start, end, count in _bins(counts)]
    encoding = {**_BINNED, "y": count_axis("traces", max(counts)), "tooltip": [*_BIN_TOOLTIP, {"field": "traces"}]}
    return chart(rows, 110, mark={"type": "bar", "binSpacing": 1, "fill": "var(--accent)"}, encoding=encoding)


def acceptance_chart(total: OfDomain) -> Spec:
    """What share of all traces each threshold would accept."""
    count = len(total.domain.decisions)
    rows = [
        {"threshold": threshold, "share": accepted / count}
        for threshold, accepted in zip(THRESHOLDS, total.accepted_at, strict=True)
    ]
    x = {"field": "threshold", "type": "quantitative", "axis": {"title": "threshold", "format": ".1f", "tickCount": 6}}
    y = {"field": "share", "type": "quantitative", "axis": {"title": "accepted", "format": ".0%", "tickCount": 5}}
    tooltip = [{"field": "threshold", "format": ".2f"}, {"field": "share", "title": "accepted", "format": ".1%"}]
    curve = {
        "mark": {"type": "area", "line": {"stroke": "var(--accent)", "strokeWidth": 2}, "fill": "var(--band)"},
        "encoding": {"x": x, "y": y, "tooltip": tooltip},
    }
    return chart(rows, 240, layer=[curve, *threshold_mark(total.scores.threshold)])


def thresholds_chart(domains: Sequence[OfDomain]) -> Spec:
    """Which threshold would accept which share of a domain's traces."""
    names = domain_names([of.domain for of in domains])
    rows = [
        {"domain": name, "accepts": _accepts(share), "threshold": threshold}
        for name, of in zip(names, domains, strict=True)
        for share in MARKED_SHARES
        if (threshold := lowest_threshold(of.accepted_at, share)) is not None
    ]
    marks = {"domain": [_accepts(share) for share in MARKED_SHARES]}
    colours = marks | {"range": ["var(--accepted)", "var(--ink)", "var(--review)"]}
    shapes = marks | {"range": ["circle", "square", "triangle-up"]}
    encoding = {
        "x": {
            "field": "threshold",
            "type": "quantitative",
            "scale": {"domain": [0, 1]},
            "axis": {"title": "threshold", "format": ".1f", "tickCount": 6, "grid": True},
        },
        "y": name_axis("domain"),
        "color": {"field": "accepts", "type": "nominal", "scale": colours},
        "shape": {"field": "accepts", "type": "nominal", "scale": shapes},
        "tooltip": [{"field": "domain"}, {"field": "accepts"}, {"field": "threshold", "format": ".2f"}],
    }
    return chart(rows, 26 * len(domains), mark={"type": "point", "size": 70, "strokeWidth": 2}, encoding=encoding)


def _bins(counts: Sequence[int]) -> list[tuple[float, float, int]]:
    return [(number / BINS, (number + 1) / BINS, count) for number, count in enumerate(counts) if count]


def _accepts(share: float) -> str:
    return f"{share:.0%}"
