"""Explains a decision in words: its arithmetic, and what it would take to pass. Lines have 80 columns, except for long ids."""

import math
import textwrap
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.text import Text

from kp_scorer.decision import Decision, GateResult, ThresholdSource
from kp_scorer.report.phrases import OVERRIDE_WORDS, plural, shortened, shown_id, spaced
from kp_scorer.scoring import (
    DEFAULT_PROFILE,
    Policy,
    complexity_terms,
    decide_again,
    dimensions,
    recoveries,
    success_factor,
    tool_names,
)
from kp_scorer.settings import Settings, load_settings
from kp_scorer.trace import STEP_TYPES, ReasoningTrace

_STEPS: Final = 2**50  # The search for the lowest value that passes divides 0..1 into steps this small: exact to the last bits.
_COLUMNS: Final = 80
_PAGE: Final = Console(width=_COLUMNS)
_TOOLS_NAMED: Final = 6
_SAME: Final = 0.99995  # Above this similarity two traces have the same tokens, as engines only vary in the last bits.
_EXCERPT_CHARS: Final = 240
_THRESHOLDS: Final[dict[ThresholdSource, str]] = {
    "default": "the threshold of all domains",
    "domain": "its domain's own threshold",
    "submission": "the threshold that its submission asked for",
}


class Term(NamedTuple):
    """The contribution of one dimension to a score."""

    dimension: str
    value: float
    weight: float
    least: float | None
    """The lowest value, 0..1, with which the trace would pass if all else stayed the same; None if even 1 is not enough."""


def terms_of(decision: Decision) -> list[Term]:
    """Return the contribution of each dimension, in the order of the dimensions."""
    parts, weights = decision.dimensions.model_dump(), decision.weights.model_dump()
    return [Term(name, parts[name], weights[name], _least(decision, name)) for name in parts]


def with_dimension(decision: Decision, dimension: str, value: float) -> Decision:
    """Return the decision with another value, 0..1, of one dimension, by the policy that the decision itself records."""
    changed = decision.dimensions.model_copy(update={dimension: value})
    policy = Policy(
        # Any profile's name will do, because the policy has only this one.
        profiles={DEFAULT_PROFILE: decision.weights},
        threshold=decision.threshold,
        review=decision.review,
        min_novelty=decision.bound("min_novelty", 0.0),
        copies="reject" if any(guard.name == "copies" for guard in decision.guards) else "score",
    )
    return decide_again(decision.model_copy(update={"dimensions": changed}), policy)


def was_capped(trace: ReasoningTrace, decision: Decision) -> bool | None:
    """Return whether more than 20 steps counted as 20. Decisions do not record it. None if the trace has other content."""
    most = decision.bound("max_confidence")
    for capped in (False, True):
        if dimensions(trace, decision.dimensions.novelty, cap_step_term=capped, max_confidence=most) == decision.dimensions:
            return capped
    return None


def _least(decision: Decision, dimension: str) -> float | None:
    def passes(step: int) -> bool:
        return with_dimension(decision, dimension, step / _STEPS).outcome == "accepted"

    # The score never falls as a dimension rises, whatever the overrides, so bisection works. A formula would be less exact.
    step = bisect_left(range(_STEPS + 1), True, key=passes)
    return step / _STEPS if step <= _STEPS else None


def explain(
    decision: Decision,
    trace: ReasoningTrace | None = None,
    nearest: ReasoningTrace | None = None,
    settings: Settings | None = None,
) -> str:
    """Explain a decision in lines of 80 columns: its arithmetic, what it would take to pass, and each profile's result.

    Args:
        decision: the decision to explain.
        trace: its trace, which explains the dimensions other than novelty.
        nearest: the nearest earlier trace, which is quoted.
        settings: the profiles and thresholds to compare; by default those of the environment and the configuration file.
    """
    traces = {each.id: each for each in (trace, nearest) if each}
    return "\n".join(decided_words(decision, traces, (settings or load_settings()).scoring))


def decided_words(decision: Decision, traces: Mapping[str, ReasoningTrace], policy: Policy | None = None) -> Iterator[str]:
    """Yield the lines that explain a decision. ``traces`` are quoted by id; with a policy, each profile's result is added."""
    trace, nearest = traces.get(decision.trace_id), decision.novelty.nearest
    terms, margin = terms_of(decision), decision.score - decision.threshold
    yield f"{decision.trace_id}: {decision.outcome} with {decision.score:.4f}"
    if decision.revised_by and decision.supersedes:
        before, success = decision.supersedes, decision.revised_by.success
        reason = f"revision {decision.revision}, as it is known now that the trace {'succeeded' if success else 'failed'}"
        yield from flowing(f"This is {reason}. Before, it was {before.outcome} with {before.score:.4f}.")
    yield from _barred_words(decision)
    # Print a tiny margin in another form: rounded to zero, it would seem to be none.
    digits = ".4f" if abs(margin) >= 0.00005 else ".1g"
    needs = "that it needs" if decision.gate is None else "that would count without a gate"
    how_far = f"{abs(margin):{digits}} {'short of' if margin < 0 else 'above'} the {decision.threshold:.4f} {needs}"
    review = "" if decision.review is None else f" From {decision.review:.4f} on it goes to review."
    if decision.gate:
        yield from flowing(_gate_words(decision.gate))
    yield from flowing(
        f"That is {how_far}, {_THRESHOLDS[decision.threshold_source]}.{review} "
        f"Its domain, {decision.domain}, is {f'taken for {decision.taken_for}, and ' if decision.taken_for else ''}"
        f"weighed by the profile {decision.profile}."
    )
    if arrival := decision.received:
        times = {**arrival.model_dump(), **decision.timings.model_dump()}
        spent = ", ".join(f"{spaced(name[:-3])} {times[name] / 1_000:,.3f} s" for name in times if name.endswith("_ms"))
        yield from flowing(f"{arrival.worker} decided it at {decision.decided_at}, at delivery {arrival.deliveries}: {spent}.")
    yield ""
    yield from _arithmetic(decision, terms, trace)
    if decision.gate is None:
        yield ""
        yield from _changes(decision, terms, trace)
    if policy:
        yield ""
        yield "By each profile and its domain's threshold, as the settings are here"
        for profile in policy.profiles:
            variant = decide_again(decision.model_copy(update={"domain": profile}), policy)
            yield f"  {profile:<20}{variant.score:.4f} of {variant.threshold:.4f}: {variant.outcome}"
    yield ""
    yield from _contents(decision, trace, traces.get(nearest.trace_id) if nearest else None)


def _barred_words(decision: Decision) -> Iterator[str]:
    """Yield the reasons that keep the trace from being accepted, whatever its score."""
    for guard in decision.guards:
        if guard.rejects:
            bound = "" if guard.bound is None else f" of {guard.bound:.4f}"
            yield f"A guard rejects it whatever its score: scoring.{guard.name}{bound}."
    for check in decision.checks:
        kinds = ", ".join(f"{count} {kind}" for kind, count in check.kinds.items()) or "nothing"
        result = f"failed ({check.failure})" if check.failure else f"found {kinds}"
        demand = {None: "", "review": ", and demands review", "rejected": ", and rejects it"}[check.outcome]
        yield from flowing(f"The check {check.name} {result}{demand}.")
    for pinned in decision.pinned:
        entry = f" to {shown_id(pinned.nearest)}" if pinned.nearest else ""
        effect = {None: "", "review": "; it demands review", "rejected": "; it rejects the trace"}[pinned.outcome]
        similar = f"similarity {pinned.similarity:.4f}{entry}, the limit is {pinned.limit:.4f}"
        yield from flowing(f"Pinned set {pinned.name}: {similar}{effect}.")


def _gate_words(gate: GateResult) -> str:
    """Return a sentence on the amount that a trace adds, and on whether the gate accepts it for that."""
    nearest = (
        f", beside {shown_id(gate.nearest.trace_id)} ({gate.nearest.similarity:.4f}), which is kept," if gate.nearest else ""
    )
    following = "" if gate.share is None else f", as one in {1 / gate.share:.3g} of its domain does"
    bar = f"The gate asks it to add {gate.bar:.4f} runs{following}"
    effect = "it is accepted by that" if gate.accepts else "that is not enough" if gate.eligible else "it may not be kept"
    requirement = "" if gate.eligible else " It does not meet the requirement of routing.requires."
    return f"{bar}; it adds {gate.adds:.4f}{nearest} and {effect}.{requirement}"


def _arithmetic(decision: Decision, terms: Sequence[Term], trace: ReasoningTrace | None) -> Iterator[str]:
    is_capped = was_capped(trace, decision) if trace else None
    ceiling = decision.bound("max_confidence")
    for term in terms:
        yield f"  {spaced(term.dimension):<20}{term.value:.4f} x {term.weight:.4f} = {term.value * term.weight:.4f}"
        if term.dimension == "novelty":
            yield from flowing(_novelty_words(decision), indent=6)
        elif trace and is_capped is not None:
            yield from flowing(_origin_words(term.dimension, trace, is_capped=is_capped, ceiling=ceiling), indent=6)
    yield f"  {'composite, their sum':<38}{decision.composite:.4f}"
    for fired in decision.overrides:
        yield f"  {OVERRIDE_WORDS[fired.name]:<38}{fired.score:.4f}"
    yield f"  {'score':<38}{decision.score:.4f}"
    if trace and is_capped is None:
        yield from flowing("That trace has other dimensions: the decision was made on other content.", indent=2)


def _origin_words(dimension: str, trace: ReasoningTrace, *, is_capped: bool, ceiling: float) -> str:
    """Return how a dimension other than novelty was computed, with confidence limited to ``ceiling``."""
    steps, tools = plural(len(trace.steps), "step"), sorted(tool_names(trace))
    if dimension == "complexity":
        terms = complexity_terms(trace, cap_step_term=is_capped)
        types = f"{len({step.type for step in trace.steps})} of {len(STEP_TYPES)} types of steps {terms.types:.4f}"
        recovered = f"{plural(recoveries(trace), 'recovery', 'recoveries')} {terms.recovery:.4f}"
        counted = ", of which 20 count" if is_capped else ""
        return _at_most_1(f"{types} + {recovered} + {steps} {terms.steps:.4f}{counted}", sum(terms))
    if dimension == "tool_diversity":
        named = ", ".join(tools[:_TOOLS_NAMED]) + (", …" if len(tools) > _TOOLS_NAMED else "")
        words = f"3 x {plural(len(tools), 'tool')} / {steps}" + (f": {named}" if named else "")
        return _at_most_1(words, 3 * len(tools) / len(trace.steps))
    ended = "it succeeded" if trace.metadata.success else "it failed"
    counted = "" if trace.outcome.confidence <= ceiling else f", of which {ceiling:.4f} counts,"
    return f"confidence {trace.outcome.confidence:.4f}{counted} x {success_factor(trace.metadata.success):g}, as {ended}"


def _novelty_words(decision: Decision) -> str:
    novelty = decision.novelty
    unread = ""
    if novelty.is_unreadable:
        unread = (
            f"; {novelty.unknown_tokens} of its {novelty.embedded_tokens} tokens are words that the model does not know, as it "
            "does not know the script: embedding.embedder = words reads it"
        )
    if novelty.source == "unreadable":
        return "unknown, as its text has no words" + (unread and " that can be compared") + unread
    if novelty.nearest:
        similarity = novelty.nearest.similarity
        subtrahend = f"{similarity:.4f}" if similarity >= 0 else f"({similarity:.4f})"
        if similarity > _SAME and novelty.embedded_tokens and novelty.text_tokens is None:
            unread += f"; both have the same {novelty.embedded_tokens} tokens, and what else they say is not read"
        return _at_most_1(f"1 - {subtrahend}, the similarity to the nearest earlier trace{unread}", 1 - similarity)
    if novelty.source == "embedding":
        return "1 - the similarity to the nearest earlier trace, which the decision does not name"
    if novelty.source == "no_embedder":
        return "there was no embedder, so every trace has this: install kp-scorer[embedding]"
    return "there was no earlier trace to compare it with"


def _at_most_1(words: str, value: float) -> str:
    return f"{words}; at most 1" if value > 1 else words


def _changes(decision: Decision, terms: Sequence[Term], trace: ReasoningTrace | None) -> Iterator[str]:
    """Yield the changes of each dimension that would let the trace pass."""
    is_accepted = decision.outcome == "accepted"
    yield "All else as it is, it would pass with" if is_accepted else "To pass, all else as it is, it would need one of these:"
    most_confidence = decision.bound("max_confidence") * (success_factor(trace.metadata.success) if trace else 1.0)
    for term in terms:
        most = most_confidence if term.dimension == "outcome_confidence" else 1.0
        yield f"  {spaced(term.dimension):<20}{_change(term, most)}"


def _change(term: Term, most: float) -> str:
    """Return words on how far a term is from its least value. ``most`` is the highest value that the trace can have."""
    if term.least is None:
        return "not even 1 is enough"
    if not term.least:
        return "any at all"
    # Round up, so that the printed value is enough, but not because of an error in the last bits.
    rounded = math.ceil(term.least * 10_000 - 1e-6) / 10_000
    least = f"{rounded:.4f} or more"
    if term.least <= term.value:
        return f"{least}, that is up to {max(0.0, term.value - rounded):.4f} lower"
    if term.least > most:
        return f"{least}, but such a trace has {most:g} at most"
    return f"{least}, that is {rounded - term.value:.4f} higher"


def _contents(decision: Decision, trace: ReasoningTrace | None, nearest: ReasoningTrace | None) -> Iterator[str]:
    novelty = decision.novelty
    if trace:
        yield "This trace"
        yield from _quote(trace)
    else:
        yield from flowing("To see how the dimensions came about, pass --traces FILE with a file that has the trace.")
    if novelty.nearest:
        similarity = f"similarity {novelty.nearest.similarity:.4f}{', of the same content' if novelty.duplicate_of else ''}"
        yield ""
        yield from flowing(f"The nearest earlier trace: {novelty.nearest.trace_id}, {similarity}")
        if nearest:
            yield from _quote(nearest)
        else:
            yield "  Its content is not available here; --traces FILE quotes it from there."


def _quote(trace: ReasoningTrace) -> Iterator[str]:
    """Yield the beginnings of the objective of a trace and of its steps."""
    for label, text in (("asked", trace.task.objective), ("did", trace.actions_text)):
        # Measure the text in cells, because some characters take two.
        for number, line in enumerate(Text(shortened(text, _EXCERPT_CHARS) or "nothing").wrap(_PAGE, _COLUMNS - 9)):
            yield f"  {'' if number else label:<7}{line.plain.rstrip()}"


def flowing(text: str, indent: int = 0) -> list[str]:
    """Return a text as lines of 80 columns."""
    margin = " " * indent
    return textwrap.wrap(
        text, _COLUMNS, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
