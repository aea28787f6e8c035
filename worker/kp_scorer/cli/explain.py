"""``kp-scorer explain``: why a decision came out as it did, and what would have had to be different."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from kp_scorer.analysis.explanation import explain as explain_decision
from kp_scorer.analysis.explanation import origin, said
from kp_scorer.broker.task_message import parse_submission
from kp_scorer.cli.gathering import gather_file
from kp_scorer.cli.ids import whole_among, whole_trace_id
from kp_scorer.cli.input import open_input, read_traces
from kp_scorer.cli.options import ledger_options
from kp_scorer.cli.output import print_json, say
from kp_scorer.cli.words import Known, dead_words, decided_words, moment, pending_words
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import InvalidTrace
from kp_scorer.settings import Settings
from kp_scorer.store import DeadLetter, Record, Store
from kp_scorer.store.endpoints import with_endpoints
from kp_scorer.trace import ReasoningTrace

_FEW: Final = 5
"""So many decisions of a file are explained without any being chosen."""
_FILES: Final = (".json", ".jsonl", ".ndjson", ".gz")

Traces = Mapping[str, ReasoningTrace]


@click.command(epilog="Example: kp-scorer explain 4f1c20a9 --traces traces.jsonl")
@click.argument("subject", metavar="TRACE_ID|FILE|-", type=click.Path(allow_dash=True))
@click.option("--id", "chosen", metavar="TRACE_ID", help="Of FILE, the one to explain; the beginning of its id will do.")
@click.option("--traces", metavar="FILE", type=click.Path(), help="Traces, to quote those from that are spoken of.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line on stdout too.")
@ledger_options("With TRACE_ID")
def explain(subject: str, chosen: str | None, traces: str | None, as_json: bool, settings: Settings) -> None:
    """Say in words, on stderr, how a decision came about, and what would have had to be different for it to pass.

    TRACE_ID is looked up in the ledger; its beginning will do where no other trace has it. Or it is one of FILE: of traces,
    which are scored offline and in order, or of decisions, as `score` and `decisions` print them. Exits 1 if there is no
    decision: then it says since when the trace is pending, why it is dead and what to do, or that it is unknown.
    """
    if subject == "-" or _is_file(subject):
        _explain_file(subject, chosen, traces, as_json, settings)
        return
    if chosen is not None:
        raise click.UsageError(f"--id chooses from a file, and there is no file {subject}")
    if subject.endswith(_FILES):
        raise click.BadParameter(f"there is no file {subject}", param_hint="FILE")
    with Store.open(with_endpoints(settings)) as store:
        row = _explain_stored(store, subject, traces, settings.limits)
    if as_json:
        print_json(row)
    if row["state"] != "decided":
        sys.exit(1)


def _is_file(name: str) -> bool:
    """Whether this can be read: a pipe that a shell has put in a file's place is no regular file."""
    try:
        return Path(name).exists() and not Path(name).is_dir()
    except OSError:
        # No file can be called so.
        return False


def _explain_file(name: str, chosen: str | None, traces: str | None, as_json: bool, settings: Settings) -> None:
    gathered = gather_file(name, settings)
    decisions = {decision.trace_id: decision for decision in gathered.decisions}
    if chosen is not None:
        trace_id = whole_among(chosen, decisions)
        if trace_id not in decisions:
            say(f"{chosen}: there is no decision on such a trace in {name}")
            sys.exit(1)
        decisions = {trace_id: decisions[trace_id]}
    elif len(decisions) > _FEW:
        raise click.UsageError(f"{name} has {len(decisions)} decisions: choose one with --id")
    elif not decisions:
        say(f"no decisions in {name}")
        sys.exit(1)
    at_hand = gathered.traces or _quoted(traces, decisions.values(), settings.limits)
    for number, decision in enumerate(decisions.values()):
        if number:
            say("")
        row = _explain_decision(decision, at_hand)
        if as_json:
            print_json(row)


def _explain_stored(store: Store, given: str, traces: str | None, limits: Limits) -> dict[str, Any]:
    """Say what is known of a trace; return the same for programs."""
    trace_id = whole_trace_id(given, store.ledger, lambda: (letter.trace_id for letter in store.dead_letters.read()))
    (record,) = store.ledger.look_up([trace_id])
    if record and record.decision:
        decision = Decision.model_validate_json(record.decision)
        return _explain_decision(decision, {**_kept(store, decision, limits), **_quoted(traces, [decision], limits)})
    if record and (waiting := store.ledger.waiting(trace_id)):
        _say_all(pending_words(trace_id, waiting))
        return {
            "trace_id": trace_id,
            "state": "pending",
            "since": moment(waiting.since_ms),
            "resends": waiting.resends,
            "attempts": waiting.attempts,
        }
    return _explain_dead(trace_id, record, _letters(store, trace_id))


def _explain_dead(trace_id: str, record: Record | None, letters: Sequence[DeadLetter]) -> dict[str, Any]:
    # Dead letters are kept for longer than records.
    died_of = record or (letters[-1] if letters else None)
    if died_of is None or died_of.reason is None:
        say(f"{trace_id}: unknown: never submitted, forgotten, expired, or not taken by a worker yet; nor is it a file")
        return {"trace_id": trace_id, "state": "unknown"}
    _say_all(dead_words(trace_id, died_of.reason, died_of.detail, letters))
    return {
        "trace_id": trace_id,
        "state": "dead",
        "reason": died_of.reason,
        "detail": died_of.detail,
        "letter_ids": [letter.letter_id for letter in letters],
    }


def _explain_decision(decision: Decision, traces: Traces) -> dict[str, Any]:
    """Say how a decision came about; return the same for programs. ``traces`` are those at hand, by id."""
    own = traces.get(decision.trace_id)
    nearest = traces.get(decision.novelty.nearest.trace_id) if decision.novelty.nearest else None
    known = Known(
        explain_decision(decision),
        origin(own, decision) if own else None,
        said(own) if own else None,
        said(nearest) if nearest else None,
    )
    _say_all(decided_words(known))
    return {
        "trace_id": decision.trace_id,
        "state": "decided",
        "decision": decision.model_dump(mode="json"),
        "margin": known.explanation.margin,
        "terms": [term._asdict() for term in known.explanation.terms],
        "without": [each._asdict() for each in known.explanation.without],
        "origin": known.origin and {**known.origin._asdict(), "complexity": known.origin.complexity._asdict()},
        "said": known.own and known.own._asdict(),
        "nearest_said": known.nearest and known.nearest._asdict(),
    }


def _quoted(name: str | None, decisions: Iterable[Decision], limits: Limits) -> Traces:
    """The traces that decisions speak of, as far as a file has them."""
    if name is None:
        return {}
    wanted = {decision.trace_id for decision in decisions}
    wanted |= {decision.novelty.nearest.trace_id for decision in decisions if decision.novelty.nearest}
    with open_input(name) as stream:
        found = [line.trace for line in read_traces(stream, limits)]
    return {trace.id: trace for trace in found if not isinstance(trace, InvalidTrace) and trace.id in wanted}


def _kept(store: Store, decision: Decision, limits: Limits) -> Traces:
    """The nearest earlier trace, if its submission is kept: while it is pending, and when it is dead."""
    if not decision.novelty.nearest:
        return {}
    trace_id = decision.novelty.nearest.trace_id
    (record,) = store.ledger.look_up([trace_id])
    payloads = []
    if record and record.state == "dead":
        payloads = [store.dead_letters.payload(letter.letter_id) for letter in _letters(store, trace_id)]
    elif waiting := store.ledger.waiting(trace_id):
        payloads = [waiting.submission]
    for payload in payloads:
        try:
            trace = decode_trace(parse_submission(payload, limits), limits)
        except InvalidTrace:
            continue
        if trace.id == trace_id:
            return {trace_id: trace}
    return {}


def _letters(store: Store, trace_id: str) -> list[DeadLetter]:
    return [letter for letter in store.dead_letters.read() if letter.trace_id == trace_id]


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)
