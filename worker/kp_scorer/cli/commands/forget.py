"""``kp-scorer forget``: erase the stored data of traces."""

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Final

import click

from kp_scorer.cli.ids import exact_trace_id
from kp_scorer.cli.input import open_input, read_bytes
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_note, print_row
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings

_ERASED_AT_ONCE: Final = 1_000
_MOST_BYTES: Final = 2**20  # Of a line with an id.


@click.command(epilog="Example: kp-scorer forget kp:trace:4f1c20a9-7d0e-4f3b-9c55-2b1f6f0d8a11")
@click.argument("trace_id", metavar="TRACE_ID|-")
@service_options
def forget(trace_id: str, settings: Settings) -> None:
    """Erase a trace: its vector, its record with the decision, its dead letters; exits 1 if nothing is kept of it.

    TRACE_ID is exact; kp:trace: may be left out. With - standard input has such ids, one a line, which are erased together.

    Workers drop the vector with their next batch, idle workers within half a second. A trace that waits on a queue is scored.
    """
    typed_ids = iter([trace_id]) if trace_id != "-" else _lines()
    erased = unknown = 0
    with Store.open(settings) as store:
        while trace_ids := list(dict.fromkeys(map(exact_trace_id, islice(typed_ids, _ERASED_AT_ONCE)))):
            # Each kind of what is kept in one pass.
            vectors = sum((log.erase(*trace_ids) for log in store.novelty_logs()), Counter[str]())
            letters = [each for each in store.dead_letters.read(trace_ids=trace_ids) if store.dead_letters.drop(each)]
            dropped = Counter(each.trace_id for each in letters)
            for each, records in zip(trace_ids, store.ledger.erase(*trace_ids), strict=True):
                kept = {"vectors": vectors[each], "records": records, "dead_letters": dropped[each]}
                print_row({"trace_id": each, **kept})
                erased += any(kept.values())
                unknown += not any(kept.values())
                nothing = f"{each}: nothing is kept of this trace: it is unknown, or what was kept has expired"
                print_note(f"erased {each}" if any(kept.values()) else nothing)
    if erased and settings.results.with_trace:
        print_note("what was published carries the trace: have its readers erase it")
    if unknown:
        sys.exit(1)


def _lines() -> Iterator[str]:
    with open_input("-") as stream:
        lines = iter(lambda: read_bytes(stream.readline, _MOST_BYTES), b"")
        yield from filter(None, (line.decode("utf-8", "backslashreplace").rstrip("\r\n") for line in lines))
