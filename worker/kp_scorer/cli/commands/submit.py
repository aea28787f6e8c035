"""``kp-scorer submit``, ``outcome``, ``status``, ``decisions`` and ``label``: submit traces, read decisions, label them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import click

from kp_scorer.cli.converting import Conversion, Line, converting_options
from kp_scorer.cli.display import DecisionTable, counted, note_if_unmeasured, progress
from kp_scorer.cli.ids import exact_trace_id, resolve_trace_id
from kp_scorer.cli.input import ReadAhead
from kp_scorer.cli.options import files_argument, follow_option, group_option, outcome_option, read_labels, service_options
from kp_scorer.cli.output import note_count, note_damaged, print_note, print_row, refusal
from kp_scorer.client import Client, Status, Submitted, read_decisions
from kp_scorer.decision import DecisionKind
from kp_scorer.errors import InvalidTrace, OutputFailed
from kp_scorer.local.processes import stopped_by_signals
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.records import Record
from kp_scorer.trace import namespaced

_BATCH_SIZE: Final = 100


@click.command(epilog="Example: kp-scorer submit traces.jsonl --wait > decisions.jsonl")
@files_argument
@click.option("--wait", is_flag=True, help="Wait for the decisions, and print each.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="With --wait, the most seconds to wait.",
)
@click.option(
    "--namespace",
    metavar="NAME",
    default="",
    help="Namespace to put into each id after kp:trace:, which keeps the ids of several producers apart.",
)
@service_options
@converting_options
def submit(
    files: tuple[str, ...], wait: bool, timeout_s: float, namespace: str, settings: Settings, conversion: Conversion
) -> bool:
    """Submit the traces in FILE (a folder, or - for standard input): JSON Lines or JSON documents, compressed or not.

    Prints a JSON line for each trace, or on a terminal a row: trace_id, state (pending, decided, dead, conflict, invalid) and,
    with --wait, the decision. Invalid lines are reported by number and field, and do not stop the others. Everything is
    submitted even if nobody reads the output.
    """
    lines = ReadAhead(files, settings.limits, _BATCH_SIZE, conversion)
    trace_ids: list[str] = []
    total = decided = 0
    failure: OutputFailed | None = None
    with Client(settings, namespace) as client:
        try:
            for line, answer, is_decided in _submit_lines(client, lines, namespace):
                total += 1
                if isinstance(answer, str):
                    trace_ids.append(answer)
                    decided += is_decided
                try:
                    if not isinstance(answer, str):
                        print_row(refusal(line.number, answer, line.file), "")
                    elif not wait:
                        state = "decided" if is_decided else "pending"
                        print_row({"trace_id": answer, "state": state}, f"{answer} {state}")
                except OutputFailed as error:
                    failure = error
        except KeyboardInterrupt:
            print_note(f"submitted {len(trace_ids)} of {total} so far")
            raise
        summary = f"submitted {len(trace_ids)} of {total}" if total else f"no traces in {', '.join(files)}"
        if failure:
            raise OutputFailed(f"{failure}; {summary} all the same")
        print_note(summary)
        note_count(decided, "of them were decided before: those decisions stand")
        undecided = _wait(client, list(dict.fromkeys(trace_ids)), timeout_s) if wait else 0
    return len(trace_ids) < total or undecided > 0


def _submit_lines(client: Client, lines: ReadAhead, namespace: str) -> Iterator[tuple[Line, Submitted, bool]]:
    """Submit lines; yield for each its trace's id or the error, and whether the trace was decided before."""
    for batch in counted(lines.batches(), "submitted"):
        documents = [line.document for line in batch if not isinstance(line.trace, InvalidTrace)]
        statuses = client.look_up([namespaced(each["id"], namespace) if namespace else each["id"] for each in documents])
        answers = zip(client.submit_many(documents), statuses, strict=True)
        for line in batch:
            if isinstance(line.trace, InvalidTrace):
                yield line, line.trace, False
            else:
                answer, status = next(answers)
                yield line, answer, status is not None and status.decision is not None


def _wait(client: Client, trace_ids: Sequence[str], timeout_s: float) -> int:
    """Print each trace as it completes, and finally the state of the others; return the number without a decision."""
    left, states = dict.fromkeys(trace_ids), Counter[str]()
    table = DecisionTable()
    with progress("decided") as advance:
        for status in client.as_completed(trace_ids, timeout_s):
            del left[status.trace_id]
            states[status.state] += 1
            note_if_unmeasured(status.decision)
            _print_status(table, status.trace_id, status)
            advance(len(trace_ids) - len(left), len(trace_ids))
    for trace_id, last in zip(left, client.look_up(list(left)) if left else [], strict=True):
        _print_status(table, trace_id, last)
        states[last.state if last else "unknown"] += 1
    note_count(states["pending"], f"still pending after {timeout_s:g} s; see `kp-scorer doctor`")
    note_count(states["unknown"], "unknown: forgotten, or dropped as dead letters, since they were submitted")
    return len(trace_ids) - states["decided"]


def _print_status(table: DecisionTable, trace_id: str, status: Status | Record | None) -> None:
    row: dict[str, object] = {"trace_id": trace_id, "state": status.state if status else "unknown"}
    if status and status.decision:
        row["decision"] = status.decision.model_dump(mode="json")
    if status and status.reason:
        row |= {"reason": status.reason, "detail": status.detail}
    if isinstance(status, Record) and status.good is not None:
        row["good"] = status.good
    table.print_row(row, status.decision if status else None)


def _truth(text: str) -> bool:
    # Click takes an empty text, as from a variable that is not set, for false.
    if not text.strip():
        raise click.BadParameter("expected true or false")
    return bool(click.BOOL(text))


@click.command(epilog='Example: kp-scorer outcome 4f1c20a9 --success false --reason "two tests failed"')
@click.argument("trace_id", metavar="ID")
@click.option("--success", type=_truth, metavar="BOOLEAN", required=True, help="Whether the task was solved: true or false.")
@click.option("--confidence", type=click.FloatRange(0, 1), help="How certain that is, from 0 to 1; by default as in the trace.")
@click.option("--reason", help="Reason, in at most 200 characters; the revision repeats it.")
@click.option(
    "--id",
    "outcome_id",
    metavar="OUTCOME_ID",
    help="Id of the outcome, kp:outcome: and a text that nobody can guess; by default derived from the rest.",
)
@service_options
def outcome(
    trace_id: str, success: bool, confidence: float | None, reason: str | None, outcome_id: str | None, settings: Settings
) -> None:
    """Submit how a trace turned out later: the trace is decided again by this outcome, and the revision is published.

    Each outcome counts once. Without --id, outcomes of a trace with equal options are the same one. An outcome waits until its
    trace is decided.

    kp:trace: may be left out, and the beginning of an ID is enough if it is unique.
    """
    with Store.open(settings) as store:
        exact = exact_trace_id(resolve_trace_id(trace_id, store.ledger))
    with Client(settings) as client:
        submitted = client.submit_outcome(exact, success=success, confidence=confidence, reason=reason, outcome_id=outcome_id)
    print_row({"trace_id": exact, "outcome_id": submitted, "state": "pending"}, f"{exact} {submitted} pending")


@click.command(epilog="Example: kp-scorer status 4f1c20a9")
@click.argument("trace_ids", metavar="ID...", nargs=-1, required=True)
@service_options
def status(trace_ids: tuple[str, ...], settings: Settings) -> bool:
    """Print the state of each trace: pending; decided, with decision and label; dead, with the reason; or unknown.

    kp:trace: may be left out, and the beginning of an ID is enough if it is unique. Exits with 0 only if all are decided.
    """
    with Store.open(settings) as store:
        resolved_ids = [resolve_trace_id(trace_id, store.ledger) for trace_id in trace_ids]
        records = store.ledger.look_up(resolved_ids)
    table = DecisionTable()
    for trace_id, record in zip(resolved_ids, records, strict=True):
        _print_status(table, trace_id, record)
    return not all(record and record.state == "decided" for record in records)


@click.command(epilog="Example: kp-scorer decisions --outcome accepted --follow")
@outcome_option
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many decisions.")
@follow_option
@group_option
@service_options
def decisions(outcome: DecisionKind | None, limit: int | None, follow: bool, group: str, settings: Settings) -> None:
    """Consume decisions from the results queues or streams and print them: as JSON Lines, or on a terminal as a table.

    A decision is acknowledged, and so removed from its queue, once it is printed. Without --follow, the command ends when the
    queues are empty. A message that is not a decision becomes a dead letter with the reason malformed. Streams need --group.
    Decisions that call a task are left to the workers of that task's app.
    """
    # Ctrl-C ends the command between two decisions: one that is printed but not acknowledged would be printed again next time.
    stopping = stopped_by_signals()
    consumed = 0
    table = DecisionTable()
    for decision in read_decisions(outcome, group=group, follow=follow, stopping=stopping, settings=settings):
        table.print_row(decision.model_dump(mode="json"), decision)
        consumed += 1
        if consumed == limit:
            stopping.set()
    print_note(f"consumed {consumed} decisions")


@click.command(epilog="Example: kp-scorer label 4f1c20a9 good")
@click.argument("trace_id", metavar="[ID", required=False)
@click.argument("judgement", metavar="good|bad]", type=click.Choice(("good", "bad")), required=False)
@click.option("--file", "labels", metavar="FILE|-", callback=read_labels, help="File of labels, one JSON object on each line.")
@service_options
def label(trace_id: str | None, judgement: str | None, labels: dict[str, bool] | None, settings: Settings) -> bool:
    """Label decided traces as good or bad: the trace ID, or those in FILE.

    FILE is JSON Lines such as {"trace_id": "kp:trace:…", "good": true}. A label is kept as long as its decision, and a new
    label replaces it. With --stored, `calibrate`, `quality` and `report` use the labels. Without ID and FILE, the command
    prints the labels in the ledger, in the form of FILE.

    kp:trace: may be left out, and the beginning of an ID is enough if it is unique. Exits with 1 if a trace is not decided.
    """
    if (trace_id is None) != (judgement is None) or None not in (trace_id, labels):
        raise click.UsageError("expected ID and good or bad, or --file")
    with Store.open(settings) as store:
        if trace_id is None and labels is None:
            for stored in store.ledger.all_decided(store.ledger.labelled()):
                if stored.good is not None:
                    print_row({"trace_id": stored.decision.trace_id, "good": stored.good})
            return note_damaged(store.ledger.damaged) > 0
        labels = labels or {}
        if trace_id is not None:
            labels[resolve_trace_id(trace_id, store.ledger)] = judgement == "good"
        undecided = store.ledger.label(labels)
    for each, state in undecided.items():
        print_row({"trace_id": each, "state": state}, f"{each} {state}")
    print_note(f"labelled {len(labels) - len(undecided)} of {len(labels)}")
    return bool(undecided)
