"""The report as text for a terminal of 80 columns."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.cells import set_cell_size

from kp_scorer.analysis.acceptance import lowest_threshold
from kp_scorer.analysis.closest_calls import gap
from kp_scorer.analysis.distribution import BINS
from kp_scorer.analysis.overrides import OVERRIDES
from kp_scorer.analysis.tempo import Throughput
from kp_scorer.analysis.whole import Analysis, OfDomain
from kp_scorer.decision import Decision
from kp_scorer.report.parts import parts
from kp_scorer.report.words import (
    OUTCOME_WORDS,
    SHARES,
    STAGE_WORDS,
    domain_names,
    duration,
    headline,
    named,
    near_duplicate_words,
    outcomes_in,
    plural,
    share,
    shown_id,
    spaced,
    threshold_words,
)

COLUMNS: Final = 80
_NAME: Final = 20
_BAR: Final = 40
_MOST_CALLS: Final = 3
_HEIGHTS: Final = " ▁▂▃▄▅▆▇█"


def text(analysis: Analysis, source: str, refused: int) -> str:
    """An analysis of decisions from ``source``, in which so many lines were ``refused``, as lines of at most 80 columns."""
    always = (_scores, _histogram, _thresholds, _closest, _dimensions, _overrides, _near_duplicates)
    said = [_head(analysis, source, refused), *parts(analysis, always, flips=_flips, letters=_letters, tempo=_tempo)]
    return "\n\n".join("\n".join(_sized(line, COLUMNS).rstrip() for line in part) for part in said)


def _head(analysis: Analysis, source: str, refused: int) -> Iterator[str]:
    total = analysis.total
    yield headline(analysis)
    yield f"from {source}" + (f", {plural(refused, 'line')} refused" if refused else "")
    others = [f"{OUTCOME_WORDS[each]} {total.scores.outcomes[each]:,}" for each in outcomes_in(total) if each != "accepted"]
    yield ", ".join([*others, f"median score {total.scores.quantiles.p50:.2f}", f"threshold {threshold_words(total)}"])


def _scores(analysis: Analysis) -> Iterator[str]:
    yield _row("scores by domain", ["traces", "10%", "25%", "median", "75%", "90%", "accept"])
    for name, of in _with_all(analysis):
        count = len(of.domain.decisions)
        figures = [f"{value:.2f}" for value in of.scores.quantiles]
        yield _row(name, [f"{count:,}", *figures, share(of.scores.outcomes["accepted"], count)])


def _histogram(analysis: Analysis) -> Iterator[str]:
    total = analysis.total
    counts = [sum(each) for each in zip(*total.scores.histograms.values(), strict=True)]
    threshold = total.scores.threshold
    marked = min(BINS - 1, int(threshold * BINS + 1e-9))
    yield "traces by score"
    for number, count in enumerate(counts):
        mark = f"  <- threshold {threshold:g}" if number == marked else ""
        yield f"  {number / BINS:.2f} {_bar(count, max(counts))} {count:,}{mark}"


def _thresholds(analysis: Analysis) -> Iterator[str]:
    yield _row("thresholds", [f"accept {part:.0%}" for part in SHARES], 12)
    for name, of in _with_all(analysis):
        found = (lowest_threshold(of.accepted_at, part) for part in SHARES)
        yield _row(name, ["none" if each is None else f"{each:.2f}" for each in found], 12)


def _closest(analysis: Analysis) -> Iterator[str]:
    yield "closest calls"
    for said, calls in (("accepted", analysis.closest.accepted), ("missed", analysis.closest.missed)):
        yield from (_call(said, decision) for decision in calls[:_MOST_CALLS])


def _call(said: str, decision: Decision) -> str:
    by = f"{decision.score:.3f} by {gap(decision):.3f}"
    return f"  {_sized(said, 8)} {by}  {_sized(named(decision.domain), 16)} {shown_id(decision.trace_id)}"


def _dimensions(analysis: Analysis) -> Iterator[str]:
    yield _row("dimensions", ["25%", "median", "75%", "0 to 1"])
    for name, found in analysis.dimensions.items():
        middle = found.quantiles
        most = max(found.counts)
        spread = "".join(_HEIGHTS[-(-count * (len(_HEIGHTS) - 1) // most)] for count in found.counts)
        yield f"{_row(spaced(name), [f'{value:.2f}' for value in (middle.p25, middle.p50, middle.p75)])}  {spread}"


def _overrides(analysis: Analysis) -> Iterator[str]:
    yield _row("overrides", ["fired"])
    names = domain_names([of.domain for of in analysis.domains])
    for override in OVERRIDES:
        fired = [(of.overrides[override], name) for of, name in zip(analysis.domains, names, strict=True)]
        where = ", ".join(f"{name} {count:,}" for count, name in sorted(fired, reverse=True) if count)
        yield f"{_sized(spaced(override), _NAME + 1)}{analysis.total.overrides[override]:>7,}  {where}"


def _near_duplicates(analysis: Analysis) -> Iterator[str]:
    yield f"near duplicates: {near_duplicate_words(analysis)}"
    if analysis.groups:
        largest = analysis.groups[0].members
        yield f"  the largest group: {len(largest):,} like {shown_id(largest[0].trace_id)}"


def _flips(analysis: Analysis) -> Iterator[str]:
    yield _row("shadow policy", ["gained", "lost", "other"], 12)
    for name, of in _with_all(analysis):
        yield _row(name, [f"{count:,}" for count in of.flips.by_acceptance], 12)


def _letters(analysis: Analysis) -> Iterator[str]:
    yield f"dead letters: {sum(analysis.letters.values()):,}"
    yield from (f"  {_sized(spaced(reason), _NAME)}{count:>8,}" for reason, count in sorted(analysis.letters.items()))


def _tempo(analysis: Analysis, throughput: Throughput) -> Iterator[str]:
    span = duration(throughput.width_s)
    yield f"throughput: at most {plural(max(throughput.counts), 'decision')} in {span}"
    yield _row("ms in a stage", ["half", "95%", "99%"], 12)
    for each in analysis.latencies:
        yield _row(STAGE_WORDS[each.stage], [f"{value:,.1f}" for value in (each.p50, each.p95, each.p99)], 12)


def _with_all(analysis: Analysis) -> Iterator[tuple[str, OfDomain]]:
    """All together, then each domain, by name."""
    yield "all", analysis.total
    yield from zip(domain_names([of.domain for of in analysis.domains]), analysis.domains, strict=True)


def _row(name: str, cells: Sequence[str], width: int = 8) -> str:
    return _sized(name, _NAME) + "".join(cell.rjust(width) for cell in cells)


def _bar(count: int, most: int) -> str:
    # Whatever there is, however little, is seen.
    return "█" * -(-count * _BAR // most)


def _sized(text: str, columns: int) -> str:
    """A text on one line, as many columns wide, some characters taking two."""
    return set_cell_size(text.replace("\n", "\\u000a"), columns)
