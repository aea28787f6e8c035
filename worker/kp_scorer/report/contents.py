"""Composes the sections of a report, which the page and the text draw."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Any, Final, Literal, NamedTuple

from kp_scorer.characters import escaped
from kp_scorer.decision import Decision, Outcome
from kp_scorer.report.drift import FEWEST, MUCH, drift, time_of
from kp_scorer.report.phrases import OUTCOME_WORDS, OVERRIDE_WORDS, bracketed, percent, plural, reasons, shown_id, spaced, why
from kp_scorer.report.summary import NEAR, Analysis, DomainSummary, by_name, gap, is_near_duplicate, lowest_threshold

DETAILS: Final = ("why", "objective")  # The columns of sentences, which come last.
WORDS: Final = frozenset({"trace", "label", *DETAILS})  # The columns of tables that hold words, besides the first.
_LABELS: Final = {True: "good", False: "bad", None: ""}
_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
_QUARTILES = ("25%", "median", "75%")
_COMPARED = ("complexity", "novelty", "tools", "confidence", "score", "outcome")
_TWO_DIGITS = "{:.2f}".format
_MOST_DRAWN = 3
_MOST_DAYS = 31
_MOST_TASKS = 10
_UNMEASURED = "No trace was compared with others, as there was no embedder, so every novelty is 0.5."
_LEADS: Final = {  # The lead of each section by its anchor.
    "map": "Traces that are alike lie together, as far as two dimensions can show it. Kept ones are large and filled, failed "
    "ones are crosses. Click a trace to read it.",
    "scores": "A score, 0 to 1, is the weighted sum of four dimensions, changed by overrides. Bars count traces in steps of "
    "0.05. From a dashed line on, the domain's threshold, they are accepted. A quarter of all scores is below that for 25%.",
    "thresholds": "The share of traces that each threshold would accept, if nothing else changed and no submission requested "
    "its own. The dashed line is the present threshold.",
    "examples": "From the highest score to the lowest, with the main reasons. `kp-scorer explain` shows all of them.",
    "closest-calls": "Decisions that a small change of the threshold would reverse, the closest first.",
    "rejections": "The reasons for the scores of rejected traces. A trace may have several.",
    "tasks": "Traces with one metadata.task, or else with equal objectives, are runs of one task. Those that are always "
    "solved teach little.",
    "origins": "By the agent and the framework that traces name, and by the day of the decision in UTC.",
    "dimensions": "Traces by value, before weights and overrides. Complexity: kinds and number of steps, and recoveries from "
    "errors. Novelty: 1 minus the similarity to the nearest earlier trace. Tool diversity: different tools per step. Outcome "
    "confidence: the producer's own, times 0.3 after a failure.",
    "novelty": "Novelty is 1 minus the similarity to the nearest earlier trace, so a repeat has 0. Each dot is a trace. The "
    "line is the median of the traces around it, half of which lie within the band. Near duplicates have a similarity of "
    f"{NEAR} or more, or the same content.",
    "drift": f"The newest seven days of decisions and the seven days before, if both have at least {FEWEST} traces. The "
    f"population stability index of two distributions is 0 if they are equal; above {MUCH:g} the change is large.",
}


class Chart(NamedTuple):
    """A chart with its title and detail."""

    chart_id: str
    title: str
    detail: str
    kind: Literal["scores", "dimension", "acceptance", "novelty", "map"]  # ``page.js`` draws each kind in its own way.
    figures: Mapping[str, Any]
    counts: Sequence[int] = ()  # The counts of its bins, if it is a histogram.


class Table(NamedTuple):
    """A table whose first column names its rows."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_open: bool = False  # True if the page shows it unfolded.
    is_in_text: bool = True


class Section(NamedTuple):
    """A part of the report. Its heading states the main figure."""

    anchor: str
    heading: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    legend: Sequence[Outcome] = ()  # The outcomes that its charts distinguish.
    lead: str = ""  # An introduction; empty for the usual one.


def head_of(analysis: Analysis, source: str, refused: int) -> tuple[str, str, Mapping[str, str]]:
    """Return a report's title, its facts (source, days, threshold) and its main figures; ``refused`` lines held no decision."""
    total = analysis.total
    accepted, count = total.outcomes["accepted"], len(total.decisions)
    title = f"{accepted:,} of {plural(count, 'trace')} accepted{bracketed(accepted, count)}"
    # The first ten characters are the date.
    days = sorted(decision.decided_at[:10] for decision in total.decisions)
    decided = " to ".join(dict.fromkeys((days[0], days[-1])))
    by_outcome = ((OUTCOME_WORDS[outcome], total.outcomes[outcome]) for outcome in _outcomes(total))
    figures = {name: f"{part:,}{bracketed(part, count)}" for name, part in by_outcome}
    repeats = sum(map(is_near_duplicate, total.decisions))
    figures |= {"median score": f"{total.scores.quartiles.p50:.2f}", "near duplicates": f"{repeats:,}"}
    rare = {"dead letters": analysis.dead_letters, "lines refused": refused}
    figures |= {name: f"{number:,}" for name, number in rare.items() if number}
    return title, f"{source} · decided {decided} · threshold {_threshold_words(total)}", figures


def sections_of(analysis: Analysis) -> list[Section]:
    """Return the sections for which an analysis has figures."""
    parts = _map, _scores, _thresholds, _examples, _closest, _tasks, _rejections, _origins, _dimensions, _novelty, _drift
    sections = (make(analysis) for make in parts)
    return [section._replace(lead=section.lead or _LEADS[section.anchor]) for section in sections if section]


def _map(analysis: Analysis) -> Section | None:
    points, number = analysis.points, sum(point["kept"] for point in analysis.points)
    caption = f"{number} kept and {len(points) - number} dropped ones are shown"
    chart = Chart("map-0", "Kept and dropped", caption, "map", {"points": points})
    return Section("map", "What was kept, among what was not", [chart]) if points else None


def _scores(analysis: Analysis) -> Section:
    outcomes, middle = _outcomes(analysis.total), analysis.total.scores.quartiles
    histograms, rows = list[Chart](), list[list[str]]()
    for number, (name, summary) in enumerate(_with_total(analysis)):
        if number:
            by_outcome = [(outcome, OUTCOME_WORDS[outcome], counts) for outcome, counts in summary.histograms.items()]
            figures = {"thresholds": _drawn(summary), "outcomes": by_outcome}
            accepted, count = summary.outcomes["accepted"], len(summary.decisions)
            detail = f"{plural(count, 'trace')}, {accepted:,} accepted{bracketed(accepted, count)}"
            histograms.append(Chart(f"scores-{number}", name, detail, "scores", figures, summary.scores.counts))
        numbers = [f"{count:,}" for count in (len(summary.decisions), *(summary.outcomes[outcome] for outcome in outcomes))]
        rows.append([name, *numbers, *map(_TWO_DIGITS, summary.scores.quartiles), _threshold_words(summary)])
    headings = ["domain", "traces", *(OUTCOME_WORDS[outcome] for outcome in outcomes), *_QUARTILES, "threshold"]
    heading = f"Half of all scores lie between {middle.p25:.2f} and {middle.p75:.2f}"
    return Section("scores", heading, histograms, [Table("Scores by domain", headings, rows)], outcomes)


def _thresholds(analysis: Analysis) -> Section | None:
    total, curves, rows = analysis.total, list[Chart](), list[list[str]]()
    if not total.thresholds:
        return None
    for number, (name, summary) in enumerate(_with_total(analysis)):
        now, count = _threshold_words(summary), len(summary.decisions)
        figures = {"thresholds": _drawn(summary), "shares": [accepted / count for accepted in summary.accepted_at]}
        curves.append(Chart(f"thresholds-{number}", name, f"now {now}", "acceptance", figures))
        lowest = [lowest_threshold(summary.accepted_at, part * count) for part in _SHARES]
        rows.append([name, *("none" if each is None else f"{each:.2f}" for each in lowest), now])
    headings = ["domain", *(f"{part:.0%}" for part in _SHARES), "now"]
    tenth = lowest_threshold(total.accepted_at, 0.1 * len(total.decisions))
    heading = "No threshold would accept one trace in ten" if tenth is None else f"To accept one trace in ten takes {tenth:.2f}"
    return Section("thresholds", heading, curves, [Table("The threshold that accepts at most", headings, rows, is_open=True)])


def _drawn(summary: DomainSummary) -> Sequence[float]:
    """Return the thresholds to draw: of many, only the lowest and the highest."""
    return summary.thresholds if len(summary.thresholds) <= _MOST_DRAWN else [summary.thresholds[0], summary.thresholds[-1]]


def _examples(analysis: Analysis) -> Section:
    examples = {OUTCOME_WORDS[outcome].capitalize(): decisions for outcome, decisions in analysis.examples.items()}
    return Section("examples", "What is accepted, and what is not", tables=_calls(examples, analysis))


def _rejections(analysis: Analysis) -> Section | None:
    rejected = [decision for decision in analysis.total.decisions if decision.outcome == "rejected"]
    if not rejected:
        return None
    kinds = Counter(kind for decision in rejected for kind in dict(reasons(decision)))
    # This override raises a score, so it never explains a rejection.
    del kinds[OVERRIDE_WORDS["recovered_from_errors"]]
    counts = kinds.most_common()
    rows = [[escaped(kind), f"{count:,}", percent(count, len(rejected))] for kind, count in counts]
    heading = f"Most often: {escaped(counts[0][0])}" if counts else "No single reason"
    table = Table("Reasons for rejection", ["reason", "traces", "share"], rows, is_open=True)
    return Section("rejections", heading, tables=[table])


def _tasks(analysis: Analysis) -> Section | None:
    if not analysis.tasks:
        return None
    always = [each for each in analysis.tasks if each[0] == each[1]]
    never = [each for each in analysis.tasks if not each[1]]
    sometimes = [each for each in analysis.tasks if 0 < each[1] < each[0]]
    groups = {"always solved": always, "sometimes solved": sometimes, "never solved": never}
    rows = [[name, f"{len(group):,}", f"{sum(runs for runs, *_ in group):,}"] for name, group in groups.items()]
    heading = f"{len(never):,} of {plural(len(analysis.tasks), 'task')} were never solved"
    tables = [Table("Tasks by how their runs end", ["tasks", "number", "runs"], rows, is_open=True)]
    if seldom := nsmallest(_MOST_TASKS, [*sometimes, *never], key=lambda task: (task[1] / task[0], -task[0])):
        named = [[shown_id(trace_id), f"{runs:,}", f"{solved:,}"] for runs, solved, trace_id in seldom]
        tables.append(Table("A trace of each task that is seldom solved", ["trace", "runs", "solved"], named))
    return Section("tasks", heading, tables=tables)


def _origins(analysis: Analysis) -> Section | None:
    decisions = analysis.total.decisions
    origins = {
        "agent": by_name(decisions, lambda decision: decision.agent_id or ""),
        "framework": by_name(decisions, lambda decision: decision.framework or ""),
        # The first ten characters are the date.
        "day": sorted(by_name(decisions, lambda decision: decision.decided_at[:10], _MOST_DAYS), key=lambda day: day.name),
    }
    headings = ["traces", "accepted", "share", "median score"]
    tables = [
        Table(f"By {origin}", [origin, *headings], [_origin(group, origin) for group in groups], is_open=True)
        for origin, groups in origins.items()
        if len(groups) > 1 or (groups[0].name and origin != "day")
    ]
    return Section("origins", "Where traces come from", tables=tables) if tables else None


def _origin(group: DomainSummary, kind: str) -> list[str]:
    count, accepted = len(group.decisions), group.outcomes["accepted"]
    return [_named(group, kind), f"{count:,}", f"{accepted:,}", percent(accepted, count), f"{group.scores.quartiles.p50:.2f}"]


def _closest(analysis: Analysis) -> Section | None:
    if not analysis.total.thresholds:
        return None
    closest = min((gap(decision) for decisions in analysis.closest for decision in decisions), default=None)
    heading = "Guards rejected all traces" if closest is None else f"The closest call is {closest:.3f} from its threshold"
    calls = dict(zip(("Just accepted", "Just missed"), analysis.closest, strict=True))
    return Section("closest-calls", heading, tables=_calls(calls, analysis))


def _calls(calls: Mapping[str, Sequence[Decision]], analysis: Analysis) -> list[Table]:
    """Return a table of the decisions under each caption: their distances from their thresholds, their reasons, and more."""
    labels, objectives, rows = analysis.labels, analysis.objectives, defaultdict[str, list[list[str]]](list)
    for caption, decisions in calls.items():
        for each in decisions:
            needs = ("", "") if each.gate else (f"{each.threshold:.4g}", f"{each.score - each.threshold:+.3f}")
            label = [_LABELS[labels.get(each.trace_id)]] if labels else []
            objective = [escaped(objectives.get(each.trace_id, ""))] if objectives else []
            figures = escaped(each.domain), f"{each.score:.3f}", *needs, shown_id(each.trace_id)
            rows[caption].append([*figures, *label, escaped(why(each)), *objective])
    before = ["domain", "score", "needs", "by", "trace", *(["label"] if labels else [])]
    headings = [*before, "why", *(["objective"] if objectives else [])]
    return [Table(caption, headings, of_caption, is_open=True) for caption, of_caption in rows.items()]


def _dimensions(analysis: Analysis) -> Section:
    spreads = [(spaced(name), spread) for name, spread in analysis.dimensions.items()]
    histograms, rows = list[Chart](), list[list[str]]()
    for number, (name, spread) in enumerate(spreads):
        detail, counts = f"median {spread.quartiles.p50:.2f}", spread.counts
        histograms.append(Chart(f"dimensions-{number}", name, detail, "dimension", {"counts": counts}, counts))
        rows.append([name, *map(_TWO_DIGITS, spread.quartiles)])
    widest, _ = max(spreads, key=lambda each: each[1].quartiles.p75 - each[1].quartiles.p25)
    table = Table("Quartiles of each dimension", ["dimension", *_QUARTILES], rows)
    return Section("dimensions", f"Traces differ most in {widest}", histograms, [table])


def _novelty(analysis: Analysis) -> Section:
    stretches = analysis.novelty.stretches
    if not stretches:
        return Section("novelty", "Novelty was not measured", lead=_UNMEASURED)
    first, last = (f"{stretch.quartiles.p50:.2f}" for stretch in (stretches[0], stretches[-1]))
    course_words = f"Novelty went from {first} to {last} as traces came"
    heading = course_words if len(stretches) > 1 else f"Half of the traces have a novelty of {first} or less"
    about = "1 is like nothing before, 0 is a repeat"
    course = Chart("novelty-course", "Novelty", about, "novelty", analysis.novelty._asdict())
    rows = [[f"{each.first:,} to {each.last:,}", *map(_TWO_DIGITS, each.quartiles)] for each in stretches]
    table = Table("Novelty in the order of traces", ["traces", *_QUARTILES], rows, is_in_text=False)
    return Section("novelty", heading, [course], [table])


def _drift(analysis: Analysis) -> Section | None:
    newest = max(map(time_of, analysis.total.decisions))
    drifts = [(name, drift(summary.decisions, newest)) for name, summary in _with_total(analysis)]
    compared = [(name, each) for name, each in drifts if each.indices]
    if not compared:
        # If the earlier week has no decisions, there is nothing to compare.
        return Section("drift", "Too few traces to compare two weeks") if drifts[0][1].traces[0] else None
    index, part, name = max((index, part, name) for name, each in compared for part, index in each.indices.items())
    heading = f"{spaced(part).capitalize()} of {name} changed most in a week: {index:.2f}"
    counts = [[name, *map("{:,}".format, each.traces), *map(percent, each.accepted, each.traces)] for name, each in compared]
    indices = [[name, *map(_TWO_DIGITS, each.indices.values())] for name, each in compared]
    weeks = Table("Two weeks", ["domain", "traces before", "now", "accepted before", "now"], counts, is_open=True)
    return Section("drift", heading, tables=[weeks, Table("Stability index", ["domain", *_COMPARED], indices, is_open=True)])


def _outcomes(summary: DomainSummary) -> list[Outcome]:
    """Return the outcomes to show: accepted and rejected always, review only if there is any."""
    return [outcome for outcome, count in summary.outcomes.items() if count or outcome != "review"]


def _with_total(analysis: Analysis) -> list[tuple[str, DomainSummary]]:
    """Return the figures of all decisions, then those of each domain, with their names."""
    return [("all", analysis.total), *((_named(each, "domain"), each) for each in analysis.domains)]


def _threshold_words(summary: DomainSummary) -> str:
    ends = *summary.thresholds[:1], *summary.thresholds[-1:]
    return " to ".join(dict.fromkeys(map("{:g}".format, ends))) or "none (gate)"


def _named(group: DomainSummary, kind: str) -> str:
    return f"{group.smaller:,} other {kind}s" if group.smaller else escaped(group.name) or "(no name)"
