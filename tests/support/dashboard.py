"""A picture of the dashboard: its panels, drawn by Vega from what Prometheus answered to their queries. Not by Grafana.

``python -m tests.support.dashboard ANSWERS`` draws ``deploy/grafana/dashboard.png`` from the file ANSWERS; where there is none,
it runs workers under load for some minutes first, and writes it.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import vl_convert

from tests.support.browser import PROGRAM
from tests.support.dashboard_load import gathered
from tests.support.prometheus import DASHBOARD

Panel = dict[str, Any]
Answers = dict[str, Any]
Row = dict[str, Any]

_WIDTH: Final = 1_060
_COLUMNS: Final = 24
_ROW: Final = 25
_GAP: Final = 6
_PAD: Final = 10
_TITLE: Final = 22
_INK, _MUTED, _LINE = "#1a1e23", "#57606a", "#dfe2e5"
_LEGEND: Final = 52
"""Letters that a line of a legend has room for."""
_COLOURS: Final = ["#0b62a4", "#c2570c", "#2c7a3f", "#7b4ba8", "#a8323e", "#5b6672", "#b08900", "#0f8a8a", "#c06090"]
_FONT: Final = "DejaVu Sans, sans-serif"


def picture(dashboard: dict[str, Any], answers: Answers) -> str:
    """The panels where the dashboard has them, as SVG."""
    panels = dashboard["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) * _ROW + _GAP
    drawn = "".join(_placed(panel, answers) for panel in panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="{_FONT}">'
        f'<rect width="100%" height="100%" fill="#eef0f2"/>{drawn}</svg>'
    )


def _placed(panel: Panel, answers: Answers) -> str:
    at, column = panel["gridPos"], (_WIDTH - _GAP) / _COLUMNS
    x, y = at["x"] * column + _GAP, at["y"] * _ROW + _GAP
    width, height = round(at["w"] * column - _GAP), at["h"] * _ROW - _GAP
    # Those of single figures are narrow.
    size = 10 if panel["type"] == "stat" else 12
    title = f'<text x="{_PAD}" y="17" font-size="{size}" font-weight="bold" fill="{_INK}">{escape(panel["title"])}</text>'
    inner = _stat(panel, answers, width, height) if panel["type"] == "stat" else _chart(panel, answers, width, height)
    frame = f'<rect width="{width}" height="{height}" fill="white" stroke="{_LINE}" rx="2"/>'
    return f'<g transform="translate({x:.1f},{y})">{frame}{title}{inner}</g>'


def _stat(panel: Panel, answers: Answers, width: int, height: int) -> str:
    """The last value, large."""
    last = [row["value"] for row in _rows(panel, answers)][-1:]
    said = _said(last[0], panel["fieldConfig"]["defaults"]["unit"]) if last else "no data"
    return (
        f'<text x="{width / 2}" y="{height * 0.7:.0f}" text-anchor="middle" font-size="34" fill="{_COLOURS[0]}">{said}</text>'
    )


def _chart(panel: Panel, answers: Answers, width: int, height: int) -> str:
    rows = list(_rows(panel, answers))
    if not rows:
        return f'<text x="{_PAD}" y="{height / 2}" font-size="12" fill="{_MUTED}">no data</text>'
    size = {"width": width - 2 * _PAD, "height": height - _TITLE - _PAD, "autosize": {"type": "fit", "contains": "padding"}}
    parts = _heatmap(rows, answers) if panel["type"] == "heatmap" else _lines(rows, answers, _unit(panel))
    spec = {"data": {"values": rows}, "background": None, "padding": 0, "config": _CONFIG, **size, **parts}
    # Each drawing begins to count its clips anew.
    svg = re.sub(r"\b(clip\d+|gradient_\d+)", rf"panel{panel['id']}-\1", vl_convert.vegalite_to_svg(spec))
    return f'<g transform="translate({_PAD},{_TITLE})">{svg}</g>'


_CONFIG: Final = {
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {"labelColor": _MUTED, "gridColor": _LINE, "domainColor": _LINE, "ticks": False, "labelFontSize": 10},
    "axisX": {"grid": False},
    "axisY": {"domain": False, "minExtent": 34, "tickCount": 4},
    "legend": {"orient": "bottom", "title": None, "labelFontSize": 10, "labelColor": _INK, "labelLimit": 310},
    "range": {"category": _COLOURS},
}


def _time(answers: Answers, **more: Any) -> dict[str, Any]:
    domain = [1_000 * answers["begun"], 1_000 * answers["ended"]]
    axis = {"title": None, "format": "%H:%M", "tickCount": 6}
    return {"field": "ms", "type": "temporal", "scale": {"domain": domain}, "axis": axis, **more}


def _lines(rows: list[Row], answers: Answers, unit: str) -> dict[str, Any]:
    most = max((row["value"] for row in rows if math.isfinite(row["value"])), default=0.0)
    # A line of nothing but 0 is to lie at the bottom, not in the middle.
    y = {"field": "value", "type": "quantitative", "scale": {"domainMin": 0, "nice": 4} if most else {"domain": [0, 1]}}
    names = list(dict.fromkeys(row["name"] for row in rows))
    columns = max(1, _LEGEND // (max(map(len, names)) + 4))
    return {
        "mark": {"type": "line", "strokeWidth": 1.5, "clip": True, "invalid": "break-paths-show-domains"},
        "encoding": {
            "x": _time(answers),
            "y": y | {"axis": {"title": None, "labelExpr": unit}},
            "color": {"field": "name", "type": "nominal", "scale": {"domain": names}, "legend": {"columns": columns}},
        },
    }


def _heatmap(rows: list[Row], answers: Answers) -> dict[str, Any]:
    """How many came between each bound and the one below it, at each time."""
    bounds = sorted({float(row["name"]) for row in rows})
    below = dict(zip(bounds[1:], bounds, strict=False))
    counts = {(row["ms"], float(row["name"])): row["value"] for row in rows}
    step_ms = sorted({row["ms"] for row in rows})[1] - min(row["ms"] for row in rows)
    cells = [
        {
            "ms": ms,
            "to": ms + step_ms,
            "low": below.get(bound, 0.0),
            "high": min(bound, 1.0),
            "count": count - counts.get((ms, below.get(bound, -1.0)), 0.0),
        }
        for (ms, bound), count in counts.items()
    ]
    return {
        "data": {"values": [cell for cell in cells if cell["count"] > 0]},
        "mark": {"type": "rect", "clip": True},
        "encoding": {
            "x": _time(answers),
            "x2": {"field": "to"},
            "y": {
                "field": "low",
                "type": "quantitative",
                "scale": {"domain": [0, 1]},
                "axis": {"title": None, "format": ".1f"},
            },
            "y2": {"field": "high"},
            "color": {
                "field": "count",
                "type": "quantitative",
                "scale": {"scheme": "blues"},
                "legend": {"orient": "right", "gradientLength": 90},
            },
        },
    }


def _rows(panel: Panel, answers: Answers) -> Iterator[Row]:
    """All points of a panel, each with the name of its series as the legend has it. Where one is no number, a line breaks."""
    part = 2**20 if panel["fieldConfig"]["defaults"]["unit"] == "bytes" else 1
    for target in panel["targets"]:
        for series in answers["series"][target["expr"]]:
            template = target["legendFormat"].replace("{{", "{").replace("}}", "}")
            name = template.format_map(defaultdict(str, series["metric"]))
            for at, value in series["values"]:
                yield {"ms": round(1_000 * at), "name": " ".join(name.split()), "value": float(value) / part}


def _unit(panel: Panel) -> str:
    """How Vega writes a figure of the panel's unit."""
    return {
        "s": "datum.value >= 1 || datum.value == 0 ? format(datum.value, '.2~f') + ' s'"
        " : format(1000 * datum.value, '.3~r') + ' ms'",
        "percentunit": "format(datum.value, '.0%')",
        "bytes": "format(datum.value, ',') + ' MiB'",
        "short": "format(datum.value, datum.value >= 1000 ? '.3~s' : '.3~g')",
    }[panel["fieldConfig"]["defaults"]["unit"]]


def _said(value: float, unit: str) -> str:
    return f"{value:.3g} s" if unit == "s" else f"{value:.3g}"


def main(file: Path) -> None:
    """Draw the picture from the answers in a file, which are gathered first if there is none."""
    if not file.exists():
        file.write_text(json.dumps(gathered()), "utf-8")
    answers = json.loads(file.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as directory:
        svg = Path(directory) / "dashboard.svg"
        svg.write_text(picture(json.loads(DASHBOARD.read_text("utf-8")), answers), "utf-8")
        # Packs better than Vega's own converter.
        size = re.findall(r'(?:width|height)="(\d+)"', svg.read_text("utf-8"))[:2]
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={','.join(size)}")
        shot = f"--screenshot={DASHBOARD.with_name('dashboard.png')}"
        subprocess.run(
            [PROGRAM, *flags, f"--user-data-dir={directory}/profile", shot, svg.as_uri()],
            capture_output=True,
            check=True,
            timeout=60,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
