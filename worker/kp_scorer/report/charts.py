"""What all charts have in common. They are Vega-Lite specifications; their colours are variables of ``page.css``.

None says anything by its colour alone.
"""

from collections.abc import Sequence
from typing import Any, Final

Spec = dict[str, Any]

_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"

CONFIG: Final[Spec] = {
    "background": "transparent",
    "font": _FONT,
    "padding": {"left": 0, "right": 8, "top": 4, "bottom": 4},
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "ticks": False,
        "labelPadding": 6,
        "labelLimit": 130,
    },
    "axisX": {"grid": False, "labelFlush": True},
    "axisY": {"domain": False, "minExtent": 24},
    "legend": {
        "labelColor": "var(--ink)",
        "labelFontSize": 12,
        "orient": "top",
        "padding": 0,
        "offset": 8,
        "symbolStrokeWidth": 2,
        "title": None,
    },
    "text": {"fill": "var(--ink)", "fontSize": 11},
    "rule": {"stroke": "var(--ink)"},
}
"""What all charts look like."""


def chart(rows: Sequence[Spec], height: float, **parts: Any) -> Spec:
    """A chart of rows, as wide as there is room and so many pixels high."""
    fit = {"type": "fit-x", "contains": "padding"}
    return {"data": {"values": list(rows)}, "width": "container", "height": height, "autosize": fit, **parts}


def threshold_mark(threshold: float) -> list[Spec]:
    """Layers for a threshold: a line, and its figure beside it."""
    data = {"values": [{"threshold": threshold, "said": f"{threshold:g}"}]}
    x = {"field": "threshold", "type": "quantitative"}
    beside = {"align": "right", "dx": -4} if threshold > 0.5 else {"align": "left", "dx": 4}
    return [
        {"data": data, "mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"x": x}},
        {
            "data": data,
            "mark": {"type": "text", "baseline": "top", "y": 0, "fontWeight": "bold", **beside},
            "encoding": {"x": x, "text": {"field": "said"}},
        },
    ]


def name_axis(field: str) -> Spec:
    """An axis of names, in the order in which they come."""
    return {"field": field, "type": "nominal", "sort": None, "axis": {"title": None, "grid": False, "labelColor": "var(--ink)"}}


def count_axis(field: str, most: int) -> Spec:
    """An axis of counts, of which the largest is ``most``."""
    # There is nothing between two counts.
    ticks = min(3, max(1, most))
    axis = {"title": None, "tickCount": ticks, "format": ",d" if most < 10_000 else "~s"}
    return {"field": field, "type": "quantitative", "scale": {"nice": ticks}, "axis": axis}
