"""``kp-scorer forget`` and ``export``: erase or print everything that is kept of a trace, an agent or a namespace."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Final

import click

from kp_scorer.broker.backlog import count_oversized
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.cli.display import progress
from kp_scorer.cli.ids import exact_trace_id
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import in_words, note_count, print_json, print_note, print_row
from kp_scorer.cli.subjects import Search, Subject, subject_options
from kp_scorer.cli.unpacking import lines_in, open_input
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLetter

_PLACES: Final = ("vectors", "records", "dead_letters", "runs")
_ERASED_AT_ONCE: Final = 1_000
_MOST_ID_BYTES: Final = 2**20  # The longest line with an id.

Letters = defaultdict[str, list[DeadLetter]]  # Dead letters by the id of their trace, which is empty if they name none.


@click.command(epilog="Example: kp-scorer forget kp:trace:4f1c20a9-7d0e-4f3b-9c55-2b1f6f0d8a11")
@click.argument("trace_id", metavar="ID|-", required=False)
@subject_options
@service_options
def forget(trace_id: str | None, subject: Subject | None, settings: Settings) -> bool:
    """Erase a trace: its vector, its record with the decision, its dead letters and its spans. Exits with 1 if it has none.

    ID must be exact; kp:trace: may be left out. With -, the ids are read from standard input, one on each line.

    With --agent or --namespace, all traces of that agent or namespace are erased, also from the queues in Redis and the streams
    of decisions, with a line for each trace, and a note that counts by place. `kp-scorer export` shows beforehand what is
    there.

    Workers drop the vector with their next batch, idle workers within half a second. A trace that is named by its id is scored
    all the same if it still waits on a queue. Dead letters without an id, and messages too large for a worker, may contain the
    trace too: notes state their numbers.
    """
    if (trace_id is None) == (subject is None):
        raise click.UsageError("expected ID, --agent or --namespace")
    with Store.open(settings) as store:
        if subject is None:
            typed_ids = iter([str(trace_id)]) if trace_id != "-" else _ids_in_stdin()
            erased, unknown = _forget_traces(store, typed_ids)
        else:
            erased, unknown = _forget_subject(store, settings, subject)
    _note_oversized(settings)
    if erased and settings.results.with_trace:
        print_note("what was published carries the trace: have its readers erase it")
    return unknown > 0


def _forget_traces(store: Store, typed_ids: Iterator[str]) -> tuple[int, int]:
    """Erase traces; return the number that existed, and the number of ids of which nothing is stored."""
    letters = Letters(list)
    for letter in store.dead_letters.read():
        letters[letter.trace_id].append(letter)
    erased = unknown = 0
    for row in _erased(store, map(exact_trace_id, typed_ids), letters):
        is_known = any(row[name] for name in _PLACES)
        erased += is_known
        unknown += not is_known
        print_row(row)
        nothing = f"{row['trace_id']}: nothing is kept of this trace: it is unknown, or what was kept has expired"
        print_note(f"erased {row['trace_id']}" if is_known else nothing)
    nameless = "dead letters name no trace: look for this one by `kp-scorer dead-letter show`, and drop those"
    note_count(len(letters[""]), nameless)
    return erased, unknown


def _forget_subject(store: Store, settings: Settings, subject: Subject) -> tuple[int, bool]:
    """Erase all data of a subject; return the number of its traces, and whether it had no data at all."""
    counts, erased, letters = Counter[str](), 0, Letters(list)
    with make_celery(settings) as app, progress("searched") as advance:
        search = Search(store, app, settings, subject, advance)
        # Search the queues first, because only records, which are erased later, tell whose a late outcome is.
        for name, _ in search.messages(remove=True):
            counts[name] += 1
        for trace_id, letter, _ in search.dead_letters():
            letters[trace_id].append(letter)
        counts["dead_letters"] = sum(map(store.dead_letters.drop, letters.pop("", [])))
        of_runs = (run.trace_id for run in search.runs())
        of_records = (record_id for record_id, _ in search.records())
        # Vectors of a namespace may outlive their records.
        of_vectors = (trace_id for _, _, trace_id, _ in search.vectors()) if subject.namespace else ()
        for row in _erased(store, chain(list(letters), of_runs, of_records, of_vectors), letters):
            if any(row[name] for name in _PLACES):
                counts.update({name: row[name] for name in _PLACES})
                erased += 1
                print_row(row)
        search.note_unsearched()
    print_note(f"erased {erased} traces: {in_words(dict(counts))}")
    return erased, not counts.total()


def _erased(store: Store, trace_ids: Iterator[str], letters: Letters) -> Iterator[dict[str, Any]]:
    """Erase all that is stored of traces; yield for each the numbers of its vectors, records, dead letters and runs."""
    erase_in_spaces = [log.erase for log in store.novelty_logs()] + [facts.erase for facts in store.all_facts()]
    while chunk := list(dict.fromkeys(islice(trace_ids, _ERASED_AT_ONCE))):
        # Erase each kind of data in one pass; the copies first, as their reader makes vectors of them.
        store.copies.erase(chunk)
        vectors = sum((erase(*chunk) for erase in erase_in_spaces), Counter[str]())
        dropped = {each: sum(map(store.dead_letters.drop, letters[each])) for each in chunk}
        for outcome_id in store.ledger.late_outcomes(*chunk):
            sum(map(store.dead_letters.drop, letters[outcome_id]))
        runs = {each for each in chunk if store.runs.forget(each)}
        for each, records in zip(chunk, store.ledger.erase(*chunk), strict=True):
            counts = vectors[each], records, dropped[each], int(each in runs)
            yield {"trace_id": each, **dict(zip(_PLACES, counts, strict=True))}


@click.command(epilog="Example: kp-scorer export --agent kp:agent:clerk > clerk.jsonl")
@subject_options
@service_options
def export(subject: Subject | None, settings: Settings) -> bool:
    """Print all that Redis has of an agent or a namespace, as JSON Lines, each with its place; a note counts them.

    The places are records (with the submission while it is pending, and with late outcomes), vectors, dead_letters, runs, and
    each queue and stream by its name. Nothing is changed. Exits with 1 if there is nothing.
    """
    if subject is None:
        raise click.UsageError("expected --agent or --namespace")
    counts = Counter[str]()
    with Store.open(settings) as store, make_celery(settings) as app, progress("searched") as advance:
        search = Search(store, app, settings, subject, advance)
        for row in _exported(search):
            counts[row["place"]] += 1
            print_json(row)
        search.note_unsearched()
    print_note(f"found {in_words(dict(counts))}")
    return not counts


def _exported(search: Search) -> Iterator[dict[str, Any]]:
    for name, content in search.messages():
        yield {"place": name, "content": content}
    for trace_id, letter, payload in search.dead_letters():
        text = payload.decode("utf-8", "backslashreplace")
        yield {"place": "dead_letters", **letter._asdict(), "trace_id": trace_id, "payload": text}
    for run in search.runs():
        yield {"place": "runs", "trace_id": run.trace_id, "export": run.export.decode("utf-8", "backslashreplace")}
    for trace_id, fields in search.records():
        yield {"place": "records", "trace_id": trace_id, **fields}
    for space, entry, trace_id, vector in search.vectors():
        yield {"place": "vectors", "trace_id": trace_id, "space": space, "entry": entry, "vector": vector.tolist()}


def _note_oversized(settings: Settings) -> None:
    """Print the numbers of oversized messages; nobody has read them, so they may hold the trace."""
    if settings.broker.is_redis:
        try:
            with make_celery(settings) as app:
                oversized = count_oversized(app, settings.queues.traces)
        except ServiceUnavailable as error:
            # Only note this: the trace has been erased, even if the broker does not answer.
            print_note(f"{settings.queues.first}.oversized could not be looked at: {error}")
        else:
            for name, count in oversized.items():
                note_count(count, f"messages too large for a worker are in the list {name} of the broker")


def _ids_in_stdin() -> Iterator[str]:
    with open_input("-") as stream:
        for _, line in lines_in(stream, _MOST_ID_BYTES):
            yield line.decode("utf-8", "backslashreplace").rstrip("\r\n")
