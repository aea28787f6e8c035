"""What is known of a trace, in words for people: a few, or lines of 80 columns, but for ids, which are never broken."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from rich.console import Console
from rich.text import Text

from kp_scorer.analysis.explanation import Explanation, Origin, Said, Term
from kp_scorer.decision import Decision, Override, ThresholdSource
from kp_scorer.report.words import plural, spaced
from kp_scorer.store import DeadLetter, Waiting
from kp_scorer.trace import STEP_TYPES, TRACE_ID_PREFIX

_COLUMNS: Final = 80
_PAGE: Final = Console(width=_COLUMNS)
_TOOLS_NAMED: Final = 6
_THRESHOLDS: Final[dict[ThresholdSource, str]] = {
    "default": "the threshold of all domains",
    "domain": "its domain's own threshold",
    "submission": "the threshold that its submission asked for",
}
_OVERRIDES: Final[dict[Override, str]] = {
    "single_thought": "a single thought (score 0.1)",
    "recovered_from_errors": "recovered from errors (+0.1)",
    "single_tool": "only one tool (-0.1)",
}
_REMEDIES: Final[dict[str, str]] = {
    "malformed": "Sent again as it is it would die again: have its producer send a trace.",
    "invalid": "Sent again as it is it would die again, unless the limits have changed: correct it and submit it; it may keep "
    "its id.",
    "conflict": "The earlier submission with this id stands: submit this one with another id.",
    "scoring_failed": "It could not be scored. Once the cause is gone, replay it.",
    "poison": "Workers ended while they had it in hand. Once the cause is gone, replay it.",
    "lost": "No worker ever got it, however often it was sent. Once the queue is well, replay it.",
}


class Known(NamedTuple):
    """A decision taken apart, and what else is at hand."""

    explanation: Explanation
    origin: Origin | None
    """How the dimensions came about; None where the trace is not at hand."""
    own: Said | None
    """What the trace says."""
    nearest: Said | None
    """What the nearest earlier trace says."""


def short_id(trace_id: str) -> str:
    """The first part of a trace id, enough to tell the traces of a table apart."""
    return trace_id.removeprefix(TRACE_ID_PREFIX)[:8]


def why(decision: Decision) -> str:
    """What weighed most, in a few words."""
    fired = [override.name for override in decision.overrides]
    reasons = [words for name, words in _OVERRIDES.items() if name in fired]
    reasons += _strengths(decision) if decision.outcome == "accepted" else _weaknesses(decision)
    return ", ".join(reasons[:3]) or (
        "just enough of everything" if decision.outcome == "accepted" else "a little short everywhere"
    )


def decided_words(known: Known) -> Iterator[str]:
    """Why a decision came out as it did."""
    decision = known.explanation.decision
    yield f"{decision.trace_id}: {decision.outcome} with {decision.score:.4f}"
    review = "" if decision.review is None else f" From {decision.review:.4f} on it goes to review."
    yield from _flowing(
        f"That is {_how_far(known.explanation)}, {_THRESHOLDS[decision.threshold_source]}.{review} "
        f"Its domain, {decision.domain}, is {f'taken for {decision.taken_for}, and ' if decision.taken_for else ''}"
        f"weighed by the profile {decision.profile}."
    )
    yield ""
    yield from _arithmetic(known)
    yield ""
    yield from _changes(known)
    yield from _contents(known)


def dead_words(trace_id: str, reason: str, detail: str, letters: Sequence[DeadLetter]) -> Iterator[str]:
    """Why there is no decision, and what to do about it; ``letters`` are those of the trace, the newest last."""
    yield from _flowing(f"{trace_id}: dead, {reason}: {detail}")
    yield from _flowing(_REMEDIES.get(reason, ""))
    if letters:
        letter = letters[-1]
        yield f"Its submission is a dead letter, last buried at {moment(letter.last_ms)}:"
        yield f"  kp-scorer dead-letter show {letter.letter_id}"
        yield f"  kp-scorer dead-letter replay {letter.letter_id}"
    if len(letters) > 1:
        yield f"There are {len(letters) - 1} more with its id; `kp-scorer dead-letter list` shows them."


def pending_words(trace_id: str, waiting: Waiting) -> Iterator[str]:
    """Since when a trace waits, and what happened to it meanwhile."""
    yield from _flowing(f"{trace_id}: pending since {moment(waiting.since_ms)}")
    if waiting.resends:
        yield f"It was lost on its way and sent again, {plural(waiting.resends, 'time')}."
    if waiting.attempts:
        yield f"Workers ended while they had it in hand, {plural(waiting.attempts, 'time')}."
    yield "`kp-scorer stats` tells how many wait on the queue."


def moment(time_ms: int) -> str:
    """A point in Unix time, in ms, as people read it."""
    return datetime.fromtimestamp(time_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _strengths(decision: Decision) -> list[str]:
    parts = decision.dimensions
    return [
        words
        for holds, words in (
            (parts.novelty >= 0.7, "new"),
            (parts.complexity >= 0.8, "rich steps"),
            (parts.tool_diversity >= 0.9, "varied tools"),
            (parts.outcome_confidence >= 0.85, "confident success"),
        )
        if holds
    ]


def _weaknesses(decision: Decision) -> list[str]:
    parts, nearest = decision.dimensions, decision.novelty.nearest
    known = ""
    if decision.novelty.duplicate_of:
        known = f"repeats {short_id(decision.novelty.duplicate_of)}"
    elif nearest and nearest.similarity >= 0.6:
        known = f"close to {short_id(nearest.trace_id)} ({nearest.similarity:.2f})"
    return [
        words
        for holds, words in (
            (bool(known), known),
            # After a failure confidence is multiplied by 0.3, so a failed trace cannot have more.
            (parts.outcome_confidence <= 0.3, "failed or doubtful"),
            (0.3 < parts.outcome_confidence < 0.75, "unsure outcome"),
            (parts.complexity < 0.5, "simple steps"),
            (parts.tool_diversity == 0.0, "no tools"),
        )
        if holds
    ]


def _how_far(explanation: Explanation) -> str:
    margin, threshold = explanation.margin, f"{explanation.decision.threshold:.4f}"
    if not margin:
        return f"exactly the {threshold} that it needs"
    much = f"{abs(margin):.4f}" if abs(margin) >= 0.00005 else "less than 0.0001"
    return f"{much} {'above' if margin > 0 else 'short of'} the {threshold} that it needs"


def _arithmetic(known: Known) -> Iterator[str]:
    decision = known.explanation.decision
    for term in known.explanation.terms:
        yield f"  {spaced(term.dimension):<20}{term.value:.4f} x {term.weight:.4f} = {term.product:.4f}"
        yield from _flowing(_origin_words(term.dimension, decision, known.origin), indent=6)
    yield f"  {'composite, their sum':<38}{decision.composite:.4f}"
    for fired in decision.overrides:
        yield f"  {_OVERRIDES[fired.name]:<38}{fired.score:.4f}"
    yield f"  {'score':<38}{decision.score:.4f}"
    if known.origin and not known.origin.is_of_this:
        yield from _flowing("The trace at hand has other dimensions: the decision was made on other content.", indent=2)


def _origin_words(dimension: str, decision: Decision, origin: Origin | None) -> str:
    if dimension == "novelty":
        return _novelty_words(decision)
    if origin is None or not origin.is_of_this:
        return ""
    if dimension == "complexity":
        types, recovery, steps = origin.complexity
        counted = ", of which 20 count" if origin.is_capped else ""
        recovered = f"{plural(origin.recoveries, 'recovery', 'recoveries')} {recovery:.4f}"
        return _at_most_1(
            f"{len(origin.types)} of {len(STEP_TYPES)} types of steps {types:.4f} + {recovered} "
            f"+ {plural(origin.steps, 'step')} {steps:.4f}{counted}",
            types + recovery + steps,
        )
    if dimension == "tool_diversity":
        named = ", ".join(origin.tools[:_TOOLS_NAMED]) + (", …" if len(origin.tools) > _TOOLS_NAMED else "")
        used, steps_taken = plural(len(origin.tools), "tool"), plural(origin.steps, "step")
        words = f"3 x {used} / {steps_taken}" + (f": {named}" if named else "")
        return _at_most_1(words, 3 * len(origin.tools) / origin.steps)
    ended = "it succeeded" if origin.success else "it failed"
    return f"confidence {origin.confidence:.4f} x {origin.success_factor:g}, as {ended}"


def _novelty_words(decision: Decision) -> str:
    novelty = decision.novelty
    if novelty.nearest:
        similarity = novelty.nearest.similarity
        shown = f"{similarity:.4f}" if similarity >= 0 else f"({similarity:.4f})"
        return _at_most_1(f"1 - {shown}, the similarity to the nearest earlier trace", 1 - similarity)
    if novelty.source == "no_embedder":
        return "there was no embedder, so every trace has this: install kp-scorer[embedding]"
    return "there was no earlier trace to compare it with"


def _at_most_1(words: str, value: float) -> str:
    return f"{words}; at most 1" if value > 1 else words


def _changes(known: Known) -> Iterator[str]:
    explanation = known.explanation
    is_accepted = explanation.decision.outcome == "accepted"
    yield "All else as it is, it would pass with" if is_accepted else "To pass, all else as it is, it would need one of these:"
    for term in explanation.terms:
        yield f"  {spaced(term.dimension):<20}{_change(term, known.origin)}"
    for each in explanation.without:
        ending = "it would pass" if each.passes else "it would not pass either" if not is_accepted else "it would not pass"
        yield f"  without {_OVERRIDES[each.override]}: {each.score:.4f}, {ending}"


def _change(term: Term, origin: Origin | None) -> str:
    if term.least is None:
        return "not even 1 is enough"
    if not term.least:
        return "any at all"
    # Rounded up, but for the last bits, so that what is shown is enough.
    shown = math.ceil(term.least * 10_000 - 1e-6) / 10_000
    least = f"{shown:.4f} or more"
    if term.least <= term.value:
        return f"{least}, that is up to {max(0.0, term.value - shown):.4f} lower"
    limit = origin.success_factor if origin and origin.is_of_this and term.dimension == "outcome_confidence" else 1.0
    if term.least > limit:
        return f"{least}, but a failure has {limit:g} at most"
    return f"{least}, that is {shown - term.value:.4f} higher"


def _contents(known: Known) -> Iterator[str]:
    nearest = known.explanation.decision.novelty.nearest
    if known.own:
        yield from ("", "This trace")
        yield from _said(known.own)
    else:
        yield ""
        yield from _flowing("With --traces FILE, of a file that has the trace, it would say how the dimensions came about.")
    if nearest:
        is_same = known.explanation.decision.novelty.duplicate_of is not None
        yield ""
        yield from _flowing(
            f"The nearest earlier trace: {nearest.trace_id}, similarity {nearest.similarity:.4f}"
            + (", of the same content" if is_same else "")
        )
        if known.nearest:
            yield from _said(known.nearest)
        else:
            yield "  What it says is not at hand; --traces FILE quotes it from there."


def _said(said: Said) -> Iterator[str]:
    for label, text in (("asked", said.asked), ("did", said.did)):
        # In cells, of which some characters take two.
        for number, line in enumerate(Text(text or "nothing").wrap(_PAGE, _COLUMNS - 9)):
            yield f"  {'' if number else label:<7}{line.plain.rstrip()}"


def _flowing(text: str, indent: int = 0) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text, _COLUMNS, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
