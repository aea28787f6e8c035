"""``kp-scorer forget``: erase everything that is kept of a trace."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Final

import click

from kp_scorer.broker.backlog import count_oversized
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.cli.ids import exact_trace_id
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_note, print_row
from kp_scorer.cli.unpacking import lines_in, open_input
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLetter

_ERASED_AT_ONCE: Final = 1_000
_MOST_ID_BYTES: Final = 2**20  # The longest line with an id.


@click.command(epilog="Example: kp-scorer forget kp:trace:4f1c20a9-7d0e-4f3b-9c55-2b1f6f0d8a11")
@click.argument("trace_id", metavar="TRACE_ID|-")
@service_options
def forget(trace_id: str, settings: Settings) -> None:
    """Erase a trace: its vector, its record with the decision, its dead letters and its spans. Exits with 1 if there are none.

    TRACE_ID is exact; kp:trace: may be left out. With -, the ids are read from standard input, one on each line.

    Workers drop the vector with their next batch, idle workers within half a second. A trace that still waits on a queue is
    scored. Dead letters without an id, and messages too large for a worker, may contain the trace too: notes state their
    numbers.
    """
    typed_ids = iter([trace_id]) if trace_id != "-" else _ids_in_stdin()
    erased = unknown = 0
    letters: defaultdict[str, list[DeadLetter]] = defaultdict(list)
    with Store.open(settings) as store:
        erase_in_spaces = [log.erase for log in store.novelty_logs()] + [facts.erase for facts in store.all_facts()]
        for letter in store.dead_letters.read():
            letters[letter.trace_id].append(letter)
        while trace_ids := list(dict.fromkeys(map(exact_trace_id, islice(typed_ids, _ERASED_AT_ONCE)))):
            # Erase each kind of data in one pass; the copies first, as their reader makes vectors of them.
            store.copies.erase(trace_ids)
            vectors = sum((erase(*trace_ids) for erase in erase_in_spaces), Counter[str]())
            dropped = {each: sum(map(store.dead_letters.drop, letters[each])) for each in trace_ids}
            for outcome_id in store.ledger.late_outcomes(*trace_ids):
                sum(map(store.dead_letters.drop, letters[outcome_id]))
            runs = {each for each in trace_ids if store.runs.forget(each)}
            for each, records in zip(trace_ids, store.ledger.erase(*trace_ids), strict=True):
                kept = {"vectors": vectors[each], "records": records, "dead_letters": dropped[each], "runs": int(each in runs)}
                print_row({"trace_id": each, **kept})
                is_known = any(kept.values())
                erased += is_known
                unknown += not is_known
                nothing = f"{each}: nothing is kept of this trace: it is unknown, or what was kept has expired"
                print_note(f"erased {each}" if is_known else nothing)
    _note_unnamed(settings, len(letters[""]))
    if erased and settings.results.with_trace:
        print_note("what was published carries the trace: have its readers erase it")
    if unknown:
        sys.exit(1)


def _note_unnamed(settings: Settings, nameless: int) -> None:
    """Print the numbers of dead letters without an id and of oversized messages, which may hold the trace unseen."""
    if nameless:
        print_note(f"{nameless} dead letters name no trace: look for this one by `kp-scorer dead-letter show`, and drop those")
    if settings.broker.is_redis:
        try:
            with make_celery(settings) as app:
                oversized = count_oversized(app, settings)
        except ServiceUnavailable as error:
            # The trace is erased even if the broker does not answer.
            print_note(f"{settings.queues.first}.oversized could not be looked at: {error}")
        else:
            for name, count in oversized.items():
                if count:
                    print_note(f"{count} messages too large for a worker are in the list {name} of the broker")


def _ids_in_stdin() -> Iterator[str]:
    with open_input("-") as stream:
        for _, line in lines_in(stream, _MOST_ID_BYTES):
            yield line.decode("utf-8", "backslashreplace").rstrip("\r\n")
