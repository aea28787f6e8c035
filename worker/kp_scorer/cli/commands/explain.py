"""``kp-scorer explain``: why a decision came out as it did, and what would have had to be different.

Its lines have 80 columns, but for ids, which are never broken.
"""

import math
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import click
from rich.console import Console
from rich.text import Text

from kp_scorer.analysis.explanation import Term, bound_of, terms_of, was_capped
from kp_scorer.characters import escaped_lines
from kp_scorer.cli.gathering import gather_file, traces_named
from kp_scorer.cli.ids import resolve_among, resolve_trace_id
from kp_scorer.cli.options import ledger_options
from kp_scorer.cli.output import print_note, print_text
from kp_scorer.decision import Decision, ThresholdSource
from kp_scorer.decoding import Limits
from kp_scorer.ledger import DeadLetter, Record, Store
from kp_scorer.local.endpoints import with_endpoints
from kp_scorer.novelty.audit import with_nearest
from kp_scorer.report.words import OVERRIDE_WORDS, plural, spaced
from kp_scorer.scoring import complexity_terms, recoveries, success_factor, tool_names
from kp_scorer.settings import Settings
from kp_scorer.trace import STEP_TYPES, ReasoningTrace

_FEW: Final = 5
"""So many decisions of a file are explained without --id."""
_FILES: Final = (".json", ".jsonl", ".ndjson", ".gz")
_COLUMNS: Final = 80
_PAGE: Final = Console(width=_COLUMNS)
_TOOLS_NAMED: Final = 6
_EXCERPT_CHARS: Final = 240
_THRESHOLDS: Final[dict[ThresholdSource, str]] = {
    "default": "the threshold of all domains",
    "domain": "its domain's own threshold",
    "submission": "the threshold that its submission asked for",
}
_REMEDIES: Final[dict[str, str]] = {
    "malformed": "Sent again as it is it would die again: have its producer send a trace.",
    "invalid": "Sent again as it is it would die again, unless the limits have changed: correct it and submit it; it may keep "
    "its id.",
    "conflict": "The earlier submission with this id stands: submit this one with another id.",
    "scoring_failed": "It could not be scored. Once the cause is gone, replay it.",
    "poison": "Workers died while it was in flight. Once the cause is gone, replay it.",
    "lost": "No worker ever received it, however often it was sent. Once the queue works, replay it.",
    "damaged": "Somebody changed its record in Redis: replay it. Or a later version decided it: look with that one.",
}

Traces = Mapping[str, ReasoningTrace]


@click.command(epilog="Example: kp-scorer explain 4f1c20a9 --traces traces.jsonl")
@click.argument("subject", metavar="TRACE_ID|FILE|-", type=click.Path(allow_dash=True))
@click.option("--id", "chosen", metavar="TRACE_ID", help="Of FILE, the one to explain; the beginning of its id will do.")
@click.option("--traces", metavar="FILE", type=click.Path(), help="Traces, to quote the trace and the nearest one from.")
@ledger_options
def explain(subject: str, chosen: str | None, traces: str | None, settings: Settings) -> None:
    """Explain in words how a decision came about, and what would have had to be different for it to pass.

    TRACE_ID is looked up in the ledger; without kp:trace: its beginning will do where no other trace has it. Or it is one of
    FILE: of traces, which are scored offline and in order, or of decisions, as `score` and `decisions` print them. Exits 1 if
    there is no decision: then it says since when the trace is pending, why it is dead and what to do, or that it is unknown.
    """
    if subject == "-" or _is_file(subject):
        lines, is_decided = _of_file(subject, chosen, traces, settings), True
    elif chosen is not None:
        raise click.UsageError(f"--id chooses from a file, and there is no file {subject}")
    elif subject.endswith(_FILES):
        raise click.BadParameter(f"there is no file {subject}", param_hint="FILE")
    else:
        settings = with_endpoints(settings)
        with Store.open(settings) as store:
            lines, is_decided = _of_ledger(store, subject, traces, settings.limits)
    for line in lines:
        print_text(escaped_lines(line) + "\n")
    if not is_decided:
        sys.exit(1)


def _is_file(name: str) -> bool:
    """Whether this can be read: a pipe that a shell has put in a file's place is no regular file."""
    # Those of Path raise OSError where no file can have such a name.
    return os.path.exists(name) and not os.path.isdir(name)  # noqa: PTH110, PTH112


def _of_file(name: str, chosen: str | None, traces: str | None, settings: Settings) -> Iterator[str]:
    scored: dict[str, ReasoningTrace] = {}
    gathered = gather_file(name, settings, scored)
    decisions = {decision.trace_id: decision for decision in gathered.decisions}
    if chosen is not None:
        trace_id = resolve_among(chosen, decisions)
        decisions = {trace_id: decisions[trace_id]} if trace_id in decisions else {}
    if len(decisions) > _FEW:
        raise click.UsageError(f"{name} has {len(decisions)} decisions: choose one with --id")
    if not decisions:
        print_note(f"no decisions in {name}" if chosen is None else f"{chosen}: there is no decision on such a trace in {name}")
        sys.exit(1)
    available = scored or traces_named(traces, decisions.values(), settings.limits)
    for number, decision in enumerate(decisions.values()):
        if number:
            yield ""
        yield from decided_words(decision, available)


def _of_ledger(store: Store, id_or_beginning: str, traces: str | None, limits: Limits) -> tuple[Iterator[str], bool]:
    """The explanation, and whether there is a decision."""
    trace_id = resolve_trace_id(
        id_or_beginning, store.ledger, lambda: (dead_letter.trace_id for dead_letter in store.dead_letters.read())
    )
    (record,) = store.ledger.look_up([trace_id])
    if record and record.decision:
        decision = _with_nearest(record.decision, store)
        return decided_words(decision, traces_named(traces, [decision], limits)), True
    if record and record.state == "pending":
        return pending_words(trace_id, record), False
    dead_letters = [dead_letter for dead_letter in store.dead_letters.read() if dead_letter.trace_id == trace_id]
    # Dead letters are kept for longer than records.
    death = record or (dead_letters[-1] if dead_letters else None)
    if death and death.reason:
        return dead_words(trace_id, death.reason, death.detail, dead_letters), False
    unknown = f"{trace_id}: unknown: never submitted, forgotten, expired, or not received by a worker yet; and no file"
    return iter([unknown]), False


def _with_nearest(decision: Decision, store: Store) -> Decision:
    """The decision with the nearest trace, where it does not name that, as far as the log still knows it."""
    novelty = decision.novelty
    if novelty.source != "embedding" or novelty.nearest or not novelty.space:
        return decision
    log = store.novelty_log(novelty.space)
    window = log.info().window
    return with_nearest(decision, list(log.entries()), window) if window else decision


def decided_words(decision: Decision, traces: Traces) -> Iterator[str]:
    """Why a decision came out as it did; its trace and the nearest earlier one add to it where they are at hand."""
    trace, nearest = traces.get(decision.trace_id), decision.novelty.nearest
    terms, margin = terms_of(decision), decision.score - decision.threshold
    yield f"{decision.trace_id}: {decision.outcome} with {decision.score:.4f}"
    for guard in decision.guards:
        if guard.rejects:
            bound = "" if guard.bound is None else f" of {guard.bound:.4f}"
            yield f"A guard rejects it whatever its score: scoring.{guard.name}{bound}."
    # As zero it would seem to pass.
    digits = ".4f" if abs(margin) >= 0.00005 else ".1g"
    how_far = f"{abs(margin):{digits}} {'short of' if margin < 0 else 'above'} the {decision.threshold:.4f} that it needs"
    review = "" if decision.review is None else f" From {decision.review:.4f} on it goes to review."
    yield from _flowing(
        f"That is {how_far}, {_THRESHOLDS[decision.threshold_source]}.{review} "
        f"Its domain, {decision.domain}, is {f'taken for {decision.taken_for}, and ' if decision.taken_for else ''}"
        f"weighed by the profile {decision.profile}."
    )
    yield ""
    yield from _arithmetic(decision, terms, trace)
    yield ""
    yield from _changes(decision, terms, trace)
    yield ""
    yield from _contents(decision, trace, traces.get(nearest.trace_id) if nearest else None)


def dead_words(trace_id: str, reason: str, detail: str, dead_letters: Sequence[DeadLetter]) -> Iterator[str]:
    """Why there is no decision, and what to do; ``dead_letters`` are those of the trace, the newest last."""
    yield from _flowing(f"{trace_id}: dead, {reason}: {detail}")
    yield from _flowing(_REMEDIES.get(reason, ""))
    if dead_letters:
        newest = dead_letters[-1]
        yield f"Its submission is a dead letter, last dead-lettered at {_moment(newest.last_ms)}:"
        yield f"  kp-scorer dead-letter show {newest.letter_id}"
        yield f"  kp-scorer dead-letter replay {newest.letter_id}"
    if len(dead_letters) > 1:
        yield f"There are {len(dead_letters) - 1} more with its id; `kp-scorer dead-letter list` shows them."


def pending_words(trace_id: str, waiting: Record) -> Iterator[str]:
    """Since when a trace is pending, and what happened to it since."""
    yield from _flowing(f"{trace_id}: pending since {_moment(waiting.since_ms)}")
    if waiting.resends:
        yield f"It was lost on its way and sent again, {plural(waiting.resends, 'time')}."
    if waiting.attempts:
        yield f"Workers died while it was in flight, {plural(waiting.attempts, 'time')}."
    yield "`kp-scorer stats` shows how many wait on the queue."


def _moment(time_ms: int) -> str:
    """A point in Unix time, in ms, as people read it."""
    return datetime.fromtimestamp(time_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _arithmetic(decision: Decision, terms: Sequence[Term], trace: ReasoningTrace | None) -> Iterator[str]:
    is_capped = was_capped(trace, decision) if trace else None
    ceiling = bound_of(decision, "max_confidence")
    for term in terms:
        yield f"  {spaced(term.dimension):<20}{term.value:.4f} x {term.weight:.4f} = {term.product:.4f}"
        if term.dimension == "novelty":
            yield from _flowing(_novelty_words(decision), indent=6)
        elif trace and is_capped is not None:
            yield from _flowing(_origin_words(term.dimension, trace, is_capped=is_capped, ceiling=ceiling), indent=6)
    yield f"  {'composite, their sum':<38}{decision.composite:.4f}"
    for fired in decision.overrides:
        yield f"  {OVERRIDE_WORDS[fired.name]:<38}{fired.score:.4f}"
    yield f"  {'score':<38}{decision.score:.4f}"
    if trace and is_capped is None:
        yield from _flowing("That trace has other dimensions: the decision was made on other content.", indent=2)


def _origin_words(dimension: str, trace: ReasoningTrace, *, is_capped: bool, ceiling: float) -> str:
    """How a dimension other than novelty came about, where at most a confidence of ``ceiling`` counts."""
    steps, tools = plural(len(trace.steps), "step"), sorted(tool_names(trace))
    if dimension == "complexity":
        terms = complexity_terms(trace, cap_step_term=is_capped)
        types = len({step.type for step in trace.steps})
        recovered = f"{plural(recoveries(trace), 'recovery', 'recoveries')} {terms.recovery:.4f}"
        counted = ", of which 20 count" if is_capped else ""
        words = (
            f"{types} of {len(STEP_TYPES)} types of steps {terms.types:.4f} + {recovered} + {steps} {terms.steps:.4f}{counted}"
        )
        return _at_most_1(words, sum(terms))
    if dimension == "tool_diversity":
        named = ", ".join(tools[:_TOOLS_NAMED]) + (", …" if len(tools) > _TOOLS_NAMED else "")
        words = f"3 x {plural(len(tools), 'tool')} / {steps}" + (f": {named}" if named else "")
        return _at_most_1(words, 3 * len(tools) / len(trace.steps))
    ended = "it succeeded" if trace.metadata.success else "it failed"
    counted = "" if trace.outcome.confidence <= ceiling else f", of which {ceiling:.4f} counts,"
    return f"confidence {trace.outcome.confidence:.4f}{counted} x {success_factor(trace):g}, as {ended}"


def _novelty_words(decision: Decision) -> str:
    novelty = decision.novelty
    if novelty.nearest:
        similarity = novelty.nearest.similarity
        subtrahend = f"{similarity:.4f}" if similarity >= 0 else f"({similarity:.4f})"
        return _at_most_1(f"1 - {subtrahend}, the similarity to the nearest earlier trace", 1 - similarity)
    if novelty.source == "embedding":
        return "1 - the similarity to the nearest earlier trace, which the decision does not name"
    if novelty.source == "no_embedder":
        return "there was no embedder, so every trace has this: install kp-scorer[embedding]"
    return "there was no earlier trace to compare it with"


def _at_most_1(words: str, value: float) -> str:
    return f"{words}; at most 1" if value > 1 else words


def _changes(decision: Decision, terms: Sequence[Term], trace: ReasoningTrace | None) -> Iterator[str]:
    """What it would take to pass, or took."""
    is_accepted = decision.outcome == "accepted"
    yield "All else as it is, it would pass with" if is_accepted else "To pass, all else as it is, it would need one of these:"
    most_confidence = bound_of(decision, "max_confidence") * (success_factor(trace) if trace else 1.0)
    for term in terms:
        most = most_confidence if term.dimension == "outcome_confidence" else 1.0
        yield f"  {spaced(term.dimension):<20}{_change(term, most)}"


def _change(term: Term, most: float) -> str:
    """How far a term is from its least value, when it can be ``most`` in such a trace."""
    if term.least is None:
        return "not even 1 is enough"
    if not term.least:
        return "any at all"
    # Rounded up, but for the last bits, so that the printed value is enough.
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
        yield from _flowing("With --traces FILE, of a file that has the trace, it would show how the dimensions came about.")
    if novelty.nearest:
        same = ", of the same content" if novelty.duplicate_of else ""
        yield ""
        yield from _flowing(
            f"The nearest earlier trace: {novelty.nearest.trace_id}, similarity {novelty.nearest.similarity:.4f}{same}"
        )
        if nearest:
            yield from _quote(nearest)
        else:
            yield "  Its content is not available here; --traces FILE quotes it from there."


def _quote(trace: ReasoningTrace) -> Iterator[str]:
    """The beginnings of what a trace was asked and of what it did."""
    for label, text in (("asked", trace.task.objective), ("did", trace.did)):
        words = " ".join(text[: 10 * _EXCERPT_CHARS].split())
        excerpt = words if len(words) <= _EXCERPT_CHARS else words[: _EXCERPT_CHARS - 1].rstrip() + "…"
        # In cells, of which some characters take two.
        for number, line in enumerate(Text(excerpt or "nothing").wrap(_PAGE, _COLUMNS - 9)):
            yield f"  {'' if number else label:<7}{line.plain.rstrip()}"


def _flowing(text: str, indent: int = 0) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text, _COLUMNS, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
