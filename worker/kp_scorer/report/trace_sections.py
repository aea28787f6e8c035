"""Sections on traces: which repeat others, which were close to the threshold, which another policy would decide otherwise."""

from collections.abc import Sequence

from kp_scorer.analysis.closest_calls import gap
from kp_scorer.analysis.near_duplicates import NEAR, Group, Member
from kp_scorer.analysis.whole import Analysis
from kp_scorer.decision import Decision
from kp_scorer.report.bar_charts import counts_chart, flips_chart
from kp_scorer.report.markup import Html, element, joined
from kp_scorer.report.sections import Section, figure, folded, grid, lead, table
from kp_scorer.report.words import OUTCOME_WORDS, domain_names, named, near_duplicate_words, plural, shown_id, spaced

_MOST_GROUPS = 20
_MOST_MEMBERS = 20
_MOST_DOMAINS = 3


def near_duplicates_section(analysis: Analysis) -> Section:
    """Groups of near duplicates, with their members."""
    groups = analysis.groups
    body = lead(f"Similar by {NEAR} or more to an earlier trace of the group, or of the same content.")
    if len(groups) > _MOST_GROUPS:
        body = joined(body, lead(f"The {_MOST_GROUPS} largest groups of {len(groups):,}:"))
    body = joined(body, *(_group(group) for group in groups[:_MOST_GROUPS]))
    heading = f"Near duplicates: {near_duplicate_words(analysis)}"
    return Section("near-duplicates", "Near duplicates", heading, body, {})


def closest_section(analysis: Analysis) -> Section:
    """The closest calls on both sides of the threshold."""
    calls = analysis.closest
    sides = [
        _calls("Just accepted", calls.accepted) if calls.accepted else lead("None was accepted."),
        _calls("Just missed", calls.missed) if calls.missed else lead("None was missed."),
    ]
    body = joined(lead("Decisions that a small change of the threshold would turn, the closest first."), grid(sides, "wide"))
    every = [*calls.accepted, *calls.missed]
    heading = f"The closest call is {min(map(gap, every)):.3f} from its threshold"
    return Section("closest", "Closest calls", heading, body, {})


def flips_section(analysis: Analysis) -> Section:
    """What the shadow policy would decide otherwise, by domain."""
    names = domain_names([of.domain for of in analysis.domains])
    total = analysis.total.flips
    heading = f"The shadow policy would turn {total.total:,} of {plural(total.traces, 'decision')}"
    if not total.total:
        return Section("flips", "Shadow policy", heading, lead("It would decide every one as it was decided."), {})
    by_name = [(name, of.flips) for name, of in zip(names, analysis.domains, strict=True)]
    rows = [[name, *(f"{count:,}" for count in flips.by_acceptance)] for name, flips in [("all", total), *by_name]]
    headings = ["domain", "newly accepted", "no longer accepted", "between review and rejected"]
    gained, lost, others = total.by_acceptance
    says = f"The shadow policy would newly accept {gained:,} and no longer accept {lost:,}; by domain in the table below."
    body = joined(
        lead("The same dimensions, weighed and judged by the policy in the settings' section shadow."),
        grid(
            [
                figure(
                    "flips-domains",
                    "By domain",
                    f"{gained:,} newly accepted, {lost:,} no longer, {others:,} between review and rejected",
                    says,
                )
            ],
            "wide",
        ),
        folded("Flips as a table", table("Decisions that the shadow policy would turn", headings, rows)),
    )
    chart = flips_chart([(name, flips.to_accepted, flips.from_accepted) for name, flips in by_name])
    return Section("flips", "Shadow policy", heading, body, {"flips-domains": chart})


def letters_section(analysis: Analysis) -> Section:
    """Dead letters by reason."""
    rows = sorted(((spaced(reason), count) for reason, count in analysis.letters.items()), key=lambda row: -row[1])
    total = sum(analysis.letters.values())
    says = "Dead letters by reason: " + ", ".join(f"{reason} {count:,}" for reason, count in rows) + "."
    body = joined(
        lead("Submissions that will get no decision. ", element("code", "kp-scorer dead-letter list"), " names them."),
        grid([figure("letters-reasons", "By reason", plural(total, "dead letter"), says)], "wide"),
        folded(
            "Dead letters as a table",
            table("Dead letters by reason", ["reason", "dead letters"], [[reason, f"{count:,}"] for reason, count in rows]),
        ),
    )
    return Section("letters", "Dead letters", plural(total, "dead letter"), body, {"letters-reasons": counts_chart(rows)})


def _group(group: Group) -> Html:
    first, count = group.members[0], len(group.members)
    rows = [_member(member) for member in group.members[:_MOST_MEMBERS]]
    caption = f"Traces like {shown_id(first.trace_id)}"
    if count > _MOST_MEMBERS:
        caption += f": the first {_MOST_MEMBERS} of {count:,}"
    headings = ["domain", "score", "novelty", "decision", "trace"]
    decisions = [member.decision for member in group.members if member.decision]
    domains = ", ".join(named(domain) for domain in list(dict.fromkeys(each.domain for each in decisions))[:_MOST_DOMAINS])
    accepted = sum(each.outcome == "accepted" for each in decisions)
    summary = f"{plural(count, 'trace')} in {domains}, {accepted:,} accepted"
    return folded(summary, table(caption, headings, rows, words=("decision", "trace")))


def _member(member: Member) -> list[str]:
    decision = member.decision
    trace = element("code", shown_id(member.trace_id))
    if decision is None:
        return ["not among these", "", "", "", trace]
    novelty = f"{decision.dimensions.novelty:.3f}"
    return [named(decision.domain), f"{decision.score:.3f}", novelty, OUTCOME_WORDS[decision.outcome], trace]


def _calls(caption: str, decisions: Sequence[Decision]) -> Html:
    rows = [
        [
            named(decision.domain),
            f"{decision.score:.3f}",
            f"{decision.threshold:g}",
            f"{decision.score - decision.threshold:+.3f}",
            element("code", shown_id(decision.trace_id)),
        ]
        for decision in decisions
    ]
    return table(caption, ["domain", "score", "needs", "by", "trace"], rows, words=("trace",))
