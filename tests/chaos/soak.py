"""Keeps three workers under a steady load while things break: ``python -m tests.chaos.soak --broker rabbitmq --minutes 60``.

Every ten seconds (``--every``) the run kills a worker, asks one to stop, closes the connections to the store or to the broker,
or kills and restarts Redis. It never kills or stops the first worker, whose resident memory it reads: a line fitted to the
readings after the warm-up gives the growth per hour with its 95% interval. The run exits with 1 unless each trace is decided
once and published, every audit on the way agrees, and the interval reaches below 1 MB per hour. A worker grows during the
warm-up in any case, because its copy of the log fills up to 11,000 entries.

With ``--teams``, three producers share the load, each with its own queue: one submits seven tenths of it in bursts, one every
two minutes; the others submit two tenths and one tenth steadily. ``waits_s`` reports for each producer the median and the 95th
percentile of the time from submission to decision.
"""

import argparse
import itertools
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime
from typing import Any, Final

import numpy as np
import psutil
from kp_scorer.client import Client

from tests.chaos.long_runs import arguments, perform, run_command, say, traces
from tests.support.arena import Arena, submit
from tests.support.fleet import Fleet
from tests.support.processes import KP_SCORER_WORKER

_READ_S: Final = 15.0
_AUDIT_S: Final = 180.0
"""Short enough that no entry leaves the log between two audits: it keeps 11,000, and 40 traces a second add 7,200."""

_WORKERS: Final = 3
_TEAMS: Final = {"traces.bursts": 0.7, "traces.steady": 0.2, "traces.rare": 0.1}
"""The share of the load that each queue gets."""

_BURST_S: Final = 120.0
_LOOKED_UP_AT_ONCE: Final = 1_000
_FLAT_MB_PER_HOUR: Final = 1.0


def main() -> int:
    """Run the soak, write progress to stderr and a JSON summary to stdout, and return the exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--warm-up", type=float, metavar="MINUTES", help="memory counts from here; default: a quarter of the run"
    )
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between two disasters")
    parser.add_argument("--rate", type=float, default=20.0, metavar="TRACES_PER_S")
    parser.add_argument("--embedder", choices=["words", "default"], default="words")
    parser.add_argument("--teams", action="store_true", help="with three producers of unequal load, each with its own queue")
    chosen = parser.parse_args()
    queues: dict[str, Any] = {"queues.traces": {queue: {} for queue in _TEAMS}} if chosen.teams else {}
    return perform(chosen, lambda arena, chosen: _Soak(arena, chosen).run(), queues)


class _Soak:
    def __init__(self, arena: Arena, chosen: argparse.Namespace) -> None:
        self._arena = arena
        self._chosen = chosen
        self._chance = random.Random(chosen.seed)
        embedder = {"embedding.embedder": "words"} if chosen.embedder == "words" else {"embedding.threads": 1}
        self._settings = arena.settings_behind_proxies(**embedder)
        self._load = traces(10**9, self._chance)
        self._shares = _TEAMS if chosen.teams else {self._settings.queues.first: 1.0}
        self._submitted: dict[str, dict[str, float]] = {queue: {} for queue in self._shares}
        """The Unix time of each submission, by queue and trace id."""
        self._broken = Counter[str]()
        self._audits = 0
        self._memory: list[tuple[float, float]] = []
        """Readings of the first worker's resident memory: the seconds since the start, and the MB."""

    def run(self) -> dict[str, Any]:
        violation = None
        logs = self._arena.directory / "logs"
        with Fleet(self._settings, logs, _WORKERS, KP_SCORER_WORKER, supervised=True) as fleet:
            fleet.wait_until_ready()
            survivor = psutil.Process(fleet[0].process.pid)
            try:
                self._soak(fleet, survivor)
                # The log keeps only the newest entries, so not every decision has one.
                self._arena.finish(fleet, self._trace_ids(), store_lost_writes=True)
            # Catch any failure, so that even a run that fails after an hour reports its readings.
            except Exception as error:
                traceback.print_exc()
                violation = repr(error)
            codes = Counter(fleet.ends)
        warm_up = self._chosen.minutes / 4 if self._chosen.warm_up is None else self._chosen.warm_up
        slope, margin = _growth([reading for reading in self._memory if reading[0] >= 60 * warm_up])
        if violation is None and slope - margin > _FLAT_MB_PER_HOUR:
            violation = f"memory grows by {slope:.2f} MB an hour, give or take {margin:.2f}"
        return {
            "submitted": len(self._trace_ids()),
            "waits_s": {queue: self._waits_s(times) for queue, times in self._submitted.items()},
            "broken": dict(self._broken),
            "exit_codes": dict(codes),
            "audits": self._audits,
            "mb": round(float(np.median([mb for _, mb in self._memory])), 1),
            "mb_per_hour": round(slope, 2),
            "mb_per_hour_margin": round(margin, 2),
            "violation": violation,
        }

    def _soak(self, fleet: Fleet, survivor: psutil.Process) -> None:
        started = time.monotonic()
        end = started + 60 * self._chosen.minutes
        every = {self._break: self._chosen.every, self._read: _READ_S, self._audit: _AUDIT_S}
        due = {action: started + seconds for action, seconds in every.items()}
        with ExitStack() as opened:
            clients = {queue: opened.enter_context(Client(self._settings, queue=queue)) for queue in self._shares}
            while (now := time.monotonic()) < end:
                for queue, client in clients.items():
                    self._submit(queue, client, now - started)
                time.sleep(0.2)
                assert survivor.is_running(), "the worker that nobody killed has ended"
                for action, at in due.items():
                    if now >= at:
                        due[action] = now + every[action]
                        action(fleet, survivor, now - started)

    def _submit(self, queue: str, client: Client, elapsed_s: float) -> None:
        """Submit the traces that are due by now; a producer that was held up catches up, as agents would."""
        due_s = elapsed_s // _BURST_S * _BURST_S if queue == "traces.bursts" else elapsed_s
        times, at = self._submitted[queue], time.time()
        missing = int(due_s * self._chosen.rate * self._shares[queue]) - len(times)
        for trace_id in submit(client, list(itertools.islice(self._load, max(0, min(missing, 100)))), patience_s=120):
            times[trace_id] = at

    def _trace_ids(self) -> list[str]:
        return [trace_id for times in self._submitted.values() for trace_id in times]

    def _waits_s(self, times: Mapping[str, float]) -> list[float]:
        trace_ids, waits = list(times), list[float]()
        with Client(self._settings) as client:
            for first in range(0, len(trace_ids), _LOOKED_UP_AT_ONCE):
                for status in client.look_up(trace_ids[first : first + _LOOKED_UP_AT_ONCE], timeout_s=60):
                    if status and status.decision:
                        decided_s = datetime.fromisoformat(status.decision.decided_at).timestamp()
                        waits.append(decided_s - times[status.trace_id])
        return [round(float(np.percentile(waits, percent)), 2) for percent in (50, 95)] if waits else []

    def _break(self, fleet: Fleet, _survivor: psutil.Process, _elapsed_s: float) -> None:
        kind = self._chance.choice(["kill", "terminate", "cut store", "cut broker", "restart Redis"])
        self._broken[kind] += 1
        if kind == "kill":
            fleet.kill(self._chance.randrange(1, _WORKERS))
        elif kind == "terminate":
            fleet[self._chance.randrange(1, _WORKERS)].process.terminate()
        elif kind == "cut store":
            self._arena.store_proxy.cut()
        elif kind == "cut broker":
            self._arena.broker_proxy.cut()
        else:
            self._arena.redis.kill()
            self._arena.redis.start()

    def _read(self, _fleet: Fleet, survivor: psutil.Process, elapsed_s: float) -> None:
        self._memory.append((elapsed_s, survivor.memory_info().rss / 1e6))

    def _audit(self, _fleet: Fleet, survivor: psutil.Process, elapsed_s: float) -> None:
        say(f"{elapsed_s:.0f} s, {len(self._trace_ids())} submitted, {survivor.memory_info().rss / 1e6:.1f} MB")
        run_command("audit", settings=self._settings)
        self._audits += 1


def _growth(readings: list[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line to the readings; return its slope in MB per hour, and half the width of the slope's 95% interval.

    The readings are averaged in at most 24 blocks: neighbouring readings are correlated, and would make the interval too
    narrow. Fewer than five readings give NaN.
    """
    if len(readings) < 5:
        return math.nan, math.nan
    blocks = np.array([np.mean(block, axis=0) for block in np.array_split(np.array(readings), min(24, len(readings)))])
    hours, megabytes = blocks[:, 0] / 3600, blocks[:, 1]
    (slope, _), covariance = np.polyfit(hours, megabytes, 1, cov=True)
    return float(slope), float(2.07 * np.sqrt(covariance[0, 0]))


if __name__ == "__main__":
    sys.exit(main())
