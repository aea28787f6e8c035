"""Charts of what goes on: novelty as traces come, decisions in time, and how long stages took."""

from collections.abc import Sequence
from typing import Final

from kp_scorer.analysis.novelty_course import Course
from kp_scorer.analysis.tempo import Latency, Throughput
from kp_scorer.report.charts import Spec, chart, count_axis, name_axis
from kp_scorer.report.words import STAGE_WORDS

_LEAST_MS: Final = 0.01
"""What is shown in place of less, which an axis of powers of ten has no place for."""


def novelty_chart(course: Course) -> Spec:
    """The novelty of single traces in their order, and the quartiles of stretches of them."""
    steps = [
        {"place": place, "p25": stretch.p25, "p50": stretch.p50, "p75": stretch.p75}
        for stretch in course.stretches
        for place in (stretch.first - 0.5, stretch.last + 0.5)
    ]
    x = {
        "field": "place",
        "type": "quantitative",
        "scale": {"domain": [0.5, course.stretches[-1].last + 0.5], "nice": False},
        "axis": {"title": "traces, in the order in which they came", "format": ",d", "tickCount": 5, "tickMinStep": 1},
    }
    y = {"type": "quantitative", "scale": {"domain": [0, 1]}, "axis": {"title": "novelty", "format": ".1f", "tickCount": 5}}
    band = {
        "mark": {"type": "area", "fill": "var(--band)"},
        "encoding": {"x": x, "y": y | {"field": "p25"}, "y2": {"field": "p75"}},
    }
    line = {
        "mark": {"type": "line", "stroke": "var(--accent)", "strokeWidth": 2},
        "encoding": {"x": x, "y": y | {"field": "p50"}},
    }
    points = {
        "data": {"values": [point._asdict() for point in course.points]},
        "mark": {"type": "point", "size": 14, "filled": True, "fill": "var(--ink)", "fillOpacity": 0.45},
        "encoding": {
            "x": x,
            "y": y | {"field": "novelty"},
            "tooltip": [{"field": "place", "format": ",d"}, {"field": "novelty", "format": ".2f"}],
        },
    }
    return chart(steps, 220, layer=[band, points, line])


def throughput_chart(throughput: Throughput) -> Spec:
    """How many decisions were made in each span of time."""
    starts = (throughput.start_s + number * throughput.width_s for number in range(len(throughput.counts)))
    rows = [
        {"from": 1_000 * start, "to": 1_000 * (start + throughput.width_s), "decisions": count}
        for start, count in zip(starts, throughput.counts, strict=True)
    ]
    time = {"type": "temporal", "scale": {"type": "utc", "nice": False}}
    width_s = throughput.width_s
    format_ = "%H:%M:%S" if width_s < 60 else "%d %b %H:%M" if width_s < 86_400 else "%Y-%m-%d"
    axis = {"title": "time, UTC", "format": format_, "tickCount": 4, "tickMinStep": 1_000 * width_s, "labelOverlap": "greedy"}
    encoding = {
        "x": time | {"field": "from", "axis": axis},
        "x2": {"field": "to"},
        "y": count_axis("decisions", max(throughput.counts)),
        "y2": {"datum": 0},
        "tooltip": [time | {"field": "from", "format": "%Y-%m-%d %H:%M:%S"}, {"field": "decisions", "format": ",d"}],
    }
    return chart(rows, 140, mark={"type": "rect", "fill": "var(--accent)", "stroke": "var(--paper)"}, encoding=encoding)


def latency_chart(latencies: Sequence[Latency]) -> Spec:
    """How long stages took: for half, 95% and 99% of traces."""
    marks = {"p50": "half", "p95": "95%", "p99": "99%"}
    rows = [
        {"stage": STAGE_WORDS[latency.stage], "of traces": said, "ms": max(_LEAST_MS, getattr(latency, name))}
        for latency in latencies
        for name, said in marks.items()
    ]
    domain = list(marks.values())
    encoding = {
        "x": {
            "field": "ms",
            "type": "quantitative",
            "scale": {"type": "log"},
            "axis": {"title": "at most so many milliseconds", "grid": True, "tickCount": 5, "format": "~g"},
        },
        "y": name_axis("stage"),
        "color": {
            "field": "of traces",
            "scale": {"domain": domain, "range": ["var(--accepted)", "var(--ink)", "var(--review)"]},
        },
        "shape": {"field": "of traces", "scale": {"domain": domain, "range": ["circle", "square", "triangle-up"]}},
        "tooltip": [{"field": "stage"}, {"field": "of traces"}, {"field": "ms", "format": ",.2f"}],
    }
    return chart(rows, 30 * len(latencies), mark={"type": "point", "size": 70, "strokeWidth": 2}, encoding=encoding)
