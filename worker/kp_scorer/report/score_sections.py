"""Sections on scores: how they are spread, what thresholds would accept, what they are made of, what changed them."""

from kp_scorer.analysis.acceptance import THRESHOLDS, lowest_threshold
from kp_scorer.analysis.distribution import BINS, Quantiles
from kp_scorer.analysis.overrides import OVERRIDES
from kp_scorer.analysis.whole import Analysis, OfDomain
from kp_scorer.report.bar_charts import shares_chart
from kp_scorer.report.markup import Html, element, joined
from kp_scorer.report.sections import Section, figure, folded, grid, lead, table
from kp_scorer.report.spread_charts import MARKED_SHARES, acceptance_chart, dimension_chart, scores_chart, thresholds_chart
from kp_scorer.report.words import OUTCOME_WORDS, SHARES, domain_names, outcomes_in, plural, share, spaced, threshold_words

_MARKED = ", ".join(f"{part:.0%}" for part in MARKED_SHARES)
_QUANTILES = ("10%", "25%", "median", "75%", "90%")


def scores_section(analysis: Analysis) -> Section:
    """How the scores of each domain are spread, with the threshold among them."""
    names = domain_names([of.domain for of in analysis.domains])
    charts, figures = {}, []
    for number, (name, of) in enumerate(zip(names, analysis.domains, strict=True)):
        chart_id, count = f"scores-{number}", len(of.domain.decisions)
        accepted, middle = of.scores.outcomes["accepted"], of.scores.quantiles
        charts[chart_id] = scores_chart(of)
        says = (
            f"Scores in {name}: half of them between {middle.p25:.2f} and {middle.p75:.2f}; "
            f"the threshold of {of.scores.threshold:g} accepts {share(accepted, count)}."
        )
        detail = f"{plural(count, 'trace')}, {accepted:,} accepted ({share(accepted, count)})"
        figures.append(figure(chart_id, name, detail, says))
    middle = analysis.total.scores.quantiles
    body = joined(
        lead("Traces by score, in steps of 0.05. The dashed line is the threshold. ", _legend(analysis.total)),
        grid(figures, "narrow"),
        folded("Scores as tables", _scores_table(analysis, names), _bins_table(analysis, names)),
    )
    return Section("scores", "Scores", f"Half of all scores lie between {middle.p25:.2f} and {middle.p75:.2f}", body, charts)


def thresholds_section(analysis: Analysis) -> Section:
    """What each threshold would accept."""
    total, count = analysis.total, len(analysis.total.domain.decisions)
    tenth = lowest_threshold(total.accepted_at, 0.1)
    heading = "No threshold would accept one trace in ten" if tenth is None else f"To accept one trace in ten takes {tenth:.2f}"
    curve = figure(
        "thresholds-curve",
        "All traces",
        "the share that each threshold would accept",
        f"The share accepted falls as the threshold rises; {total.scores.threshold:g} accepts "
        f"{share(total.scores.outcomes['accepted'], count)}.",
    )
    dots = figure(
        "thresholds-domains",
        "By domain",
        f"the thresholds that accept {_MARKED} of each domain",
        f"For each domain, the thresholds that accept {_MARKED} of its traces; the table below has them.",
    )
    body = joined(
        lead("As if the threshold alone were another one, and no submission asked for its own."),
        grid([curve, dots], "wide"),
        _thresholds_table(analysis),
        folded("What each threshold would accept", _acceptance_table(analysis)),
    )
    charts = {"thresholds-curve": acceptance_chart(total), "thresholds-domains": thresholds_chart(analysis.domains)}
    return Section("thresholds", "Thresholds", heading, body, charts)


def dimensions_section(analysis: Analysis) -> Section:
    """How each dimension is spread."""
    charts, figures = {}, []
    for name, found in analysis.dimensions.items():
        chart_id, middle = f"dimensions-{name}", found.quantiles
        charts[chart_id] = dimension_chart(found.counts)
        says = f"{spaced(name)}: half of the traces between {middle.p25:.2f} and {middle.p75:.2f}."
        figures.append(figure(chart_id, spaced(name), f"median {middle.p50:.2f}", says))
    rows = [[spaced(name), *_figures(found.quantiles)] for name, found in analysis.dimensions.items()]
    bins = [[_bin(number), *(f"{found.counts[number]:,}" for found in analysis.dimensions.values())] for number in range(BINS)]
    body = joined(
        lead("Traces by the value of each dimension, before weights and overrides."),
        grid(figures, "narrow"),
        folded(
            "Dimensions as tables",
            table("Quantiles of each dimension", ["dimension", *_QUANTILES], rows),
            table("Traces by the value of each dimension", ["value", *map(spaced, analysis.dimensions)], bins),
        ),
    )
    widest = max(analysis.dimensions, key=lambda name: _width(analysis.dimensions[name].quantiles))
    return Section("dimensions", "Dimensions", f"Traces differ most in {spaced(widest)}", body, charts)


def overrides_section(analysis: Analysis) -> Section:
    """How often each override fired, by domain."""
    names = domain_names([of.domain for of in analysis.domains])
    count, total = len(analysis.total.domain.decisions), analysis.total.overrides
    charts, figures = {}, []
    for override in OVERRIDES:
        fired = total[override]
        detail = f"fired for {plural(fired, 'trace')} ({share(fired, count)})" if fired else "never fired"
        if not fired:
            figures.append(element("figure", element("figcaption", element("h3", spaced(override)), element("p", detail))))
            continue
        chart_id = f"overrides-{override}"
        charts[chart_id] = shares_chart(
            [(name, of.overrides[override], len(of.domain.decisions)) for name, of in zip(names, analysis.domains, strict=True)]
        )
        figures.append(
            figure(chart_id, spaced(override), detail, f"{spaced(override)} {detail}; by domain in the table below.")
        )
    rows = [
        [name, *(f"{of.overrides[override]:,}" for override in OVERRIDES), f"{len(of.domain.decisions):,}"]
        for name, of in zip(["all", *names], [analysis.total, *analysis.domains], strict=True)
    ]
    body = joined(
        lead("The share of each domain's traces whose score it changed, and how many those are."),
        grid(figures, "narrow"),
        folded(
            "Overrides as a table",
            table("How many traces each override fired for", ["domain", *map(spaced, OVERRIDES), "traces"], rows),
        ),
    )
    most = max(OVERRIDES, key=lambda override: total[override])
    heading = (
        f"{spaced(most).capitalize()} fired for {share(total[most], count)} of traces" if total[most] else "No override fired"
    )
    return Section("overrides", "Overrides", heading, body, charts)


def _legend(total: OfDomain) -> Html:
    entries = (
        element("li", element("span", class_=f"swatch {outcome}", aria_hidden="true"), OUTCOME_WORDS[outcome])
        for outcome in outcomes_in(total)
    )
    return element("ul", *entries, class_="legend")


def _scores_table(analysis: Analysis, names: list[str]) -> Html:
    outcomes = outcomes_in(analysis.total)
    rows = [
        [
            name,
            f"{len(of.domain.decisions):,}",
            *(f"{of.scores.outcomes[outcome]:,}" for outcome in outcomes),
            *_figures(of.scores.quantiles),
            threshold_words(of),
        ]
        for name, of in zip(["all", *names], [analysis.total, *analysis.domains], strict=True)
    ]
    headings = ["domain", "traces", *(OUTCOME_WORDS[outcome] for outcome in outcomes), *_QUANTILES, "threshold"]
    return table("Scores by domain", headings, rows)


def _bins_table(analysis: Analysis, names: list[str]) -> Html:
    rows = [
        [_bin(number), *(f"{sum(counts[number] for counts in of.scores.histograms.values()):,}" for of in analysis.domains)]
        for number in range(BINS)
    ]
    return table("Traces by score", ["score", *names], rows)


def _thresholds_table(analysis: Analysis) -> Html:
    names = ["all", *domain_names([of.domain for of in analysis.domains])]
    rows = [
        [name, *(_threshold(of, part) for part in SHARES), threshold_words(of)]
        for name, of in zip(names, [analysis.total, *analysis.domains], strict=True)
    ]
    return table("The threshold that accepts at most", ["domain", *(f"{part:.0%}" for part in SHARES), "now"], rows)


def _threshold(of: OfDomain, part: float) -> str:
    found = lowest_threshold(of.accepted_at, part)
    return "none" if found is None else f"{found:.2f}"


def _acceptance_table(analysis: Analysis) -> Html:
    shown = [analysis.total, *analysis.domains]
    rows = [
        [f"{THRESHOLDS[place]:.2f}", *(share(of.accepted_at[place], len(of.domain.decisions)) for of in shown)]
        for place in range(0, len(THRESHOLDS), 5)
    ]
    names = ["all", *domain_names([of.domain for of in analysis.domains])]
    return table("Accepted by each threshold", ["threshold", *names], rows)


def _figures(found: Quantiles) -> list[str]:
    return [f"{value:.2f}" for value in found]


def _width(found: Quantiles) -> float:
    return found.p90 - found.p10


def _bin(number: int) -> str:
    return f"{number / BINS:.2f} to {(number + 1) / BINS:.2f}"
