"""How long an honest trace takes while somebody else puts hostile messages on the same queue.

Honest traces are submitted one after the other on Redis: behind nothing, behind some harmless messages each, and behind as many
hostile ones, in turns. The clock runs from before ``submit`` is called until the decision is in the ledger. The worker is the
real one with an embedder that hashes words, so that what is measured is the handling of messages, and not the model.

- ``p50_ms``, ``p95_ms``, ``p99_ms``: of the honest traces.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from statistics import quantiles
from typing import Final

from kp_scorer.client import Client

from tests.benchmarks.common import Row, emit, show_table
from tests.support.arena import Arena
from tests.support.attacking import Put, open_queue
from tests.support.attacks import Attack, attacks, plain
from tests.support.fleet import start_fleet
from tests.support.processes import FAST_WORKER
from tests.support.traces import short_traces

_COLUMNS: Final = {"behind": "behind", "p50_ms": "p50 ms", "p95_ms": "p95", "p99_ms": "p99"}
_TURN: Final = 25


def main() -> None:
    """Measure each kind of messages in front and write a line of JSON for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=500, metavar="N", help="honest traces of each kind (default: 500)")
    parser.add_argument("--each", type=int, default=4, metavar="N", help="messages before each of them (default: 4)")
    options = parser.parse_args()
    rows: list[Row] = []
    in_front = {"nothing": iter(()), "harmless": cycle(list(plain())), "hostile": cycle(list(attacks()))}
    taken: dict[str, list[float]] = {kind: [] for kind in in_front}
    with tempfile.TemporaryDirectory() as directory, Arena("redis", "", Path(directory), {}) as arena:
        settings = arena.settings()
        with (
            start_fleet(settings, Path(directory) / "logs", 1, FAST_WORKER),
            open_queue(arena) as put,
            Client(settings) as client,
        ):
            for _ in range(options.traces // _TURN):
                for kind, messages in in_front.items():
                    taken[kind] += measure(client, put, messages, options.each)
    for kind, times in taken.items():
        cuts = quantiles(times, n=100)
        figures = {f"p{percent}_ms": round(1_000 * cuts[percent - 1], 1) for percent in (50, 95, 99)}
        rows.append({"benchmark": "hostile", "behind": kind, **figures})
        emit(rows[-1])
    show_table(rows, _COLUMNS)


def measure(client: Client, put: Put, messages: Iterator[Attack], each: int) -> list[float]:
    """Seconds that each honest trace of a turn takes behind ``each`` messages."""
    taken = []
    for trace in short_traces(_TURN, seed=1):
        for message in islice(messages, each):
            put(message)
        started = time.perf_counter()
        client.wait(client.submit(trace), timeout_s=60)
        taken.append(time.perf_counter() - started)
    return taken


if __name__ == "__main__":
    main()
