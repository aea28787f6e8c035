"""Charts of a bar for each name."""

from collections.abc import Sequence

from kp_scorer.report.charts import Spec, chart, name_axis


def shares_chart(rows: Sequence[tuple[str, int, int]]) -> Spec:
    """A bar for each name: a part, and how much of the whole that is. Rows are name, part, whole."""
    shown = [{"name": name, "traces": part, "share": part / whole, "said": f"{part:,}"} for name, part, whole in rows]
    y = name_axis("name")
    # With room for the figure beside the longest.
    widest = max(0.1, *(1.15 * part / whole for _, part, whole in rows))
    bars = {
        "mark": {"type": "bar", "height": 12, "fill": "var(--accent)"},
        "encoding": {
            "x": {
                "field": "share",
                "type": "quantitative",
                "scale": {"domain": [0, widest]},
                "axis": {"title": None, "format": ".0%", "tickCount": 3, "grid": True},
            },
            "y": y,
            "tooltip": [{"field": "name"}, {"field": "traces"}, {"field": "share", "format": ".1%"}],
        },
    }
    said = {
        "mark": {"type": "text", "align": "left", "dx": 4},
        "encoding": {"x": {"field": "share", "type": "quantitative"}, "y": y, "text": {"field": "said"}},
    }
    return chart(shown, 22 * len(rows), layer=[bars, said])


def flips_chart(rows: Sequence[tuple[str, int, int]]) -> Spec:
    """To the right what another policy would newly accept, to the left what it no longer would. Rows: name, gained, lost."""
    shown = [{"name": name, "traces": gained, "count": gained, "what": "newly accepted"} for name, gained, _ in rows]
    shown += [{"name": name, "traces": -lost, "count": lost, "what": "no longer accepted"} for name, _, lost in rows]
    # Those to the left are no negative numbers.
    axis = {"title": "fewer  ←  accepted  →  more", "labelExpr": "format(abs(datum.value), ',d')", "tickMinStep": 1}
    ways = {"domain": ["newly accepted", "no longer accepted"]}
    encoding = {
        "x": {"field": "traces", "type": "quantitative", "axis": axis},
        "y": name_axis("name"),
        "fill": {"field": "what", "scale": ways | {"range": ["var(--accepted-fill)", "var(--rejected-fill)"]}, "legend": None},
        "stroke": {"field": "what", "scale": ways | {"range": ["var(--accepted)", "var(--rejected)"]}},
        "tooltip": [{"field": "name"}, {"field": "what"}, {"field": "count"}],
    }
    return chart(shown, 24 * len(rows), mark={"type": "bar", "height": 14, "strokeWidth": 1}, encoding=encoding)


def counts_chart(rows: Sequence[tuple[str, int]]) -> Spec:
    """A bar for each name and its count."""
    shown = [{"name": name, "count": count, "said": f"{count:,}"} for name, count in rows]
    most = max(count for _, count in rows)
    x = {"field": "count", "type": "quantitative", "scale": {"domain": [0, 1.15 * most]}, "axis": None}
    bars = {"mark": {"type": "bar", "height": 14, "fill": "var(--accent)"}, "encoding": {"x": x, "y": name_axis("name")}}
    said = {
        "mark": {"type": "text", "align": "left", "dx": 4},
        "encoding": {"x": x, "y": name_axis("name"), "text": {"field": "said"}},
    }
    return chart(shown, 24 * len(rows), layer=[bars, said])
