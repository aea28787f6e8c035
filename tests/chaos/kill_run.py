"""Runs real workers and kills one every few seconds: ``python -m tests.chaos.kill_run --broker rabbitmq --traces 2000``.

The run exits with 1 unless every trace is decided once, with the novelty that the log gives it, and published.
"""

import argparse
import json
import random
import sys
import time
from typing import Any

from kp_scorer.client import Client

from tests.chaos.long_runs import arguments, perform, run_command, say, traces
from tests.support.arena import Arena, put, submit, wait_until_ended
from tests.support.fleet import Fleet
from tests.support.late_outcomes import LateOutcomes
from tests.support.processes import KP_SCORER_WORKER

_CHUNK = 50
_IN_QUEUE = 200
"""Traces are submitted whenever fewer than this many wait, so that every kill meets a worker with messages in flight."""
_GATED = {
    "novelty.against": "succeeded",
    # `audit` cannot check the matches of `tasks`, which is a set of texts: the log has no vectors of objectives.
    "novelty.pinned": {"tasks": {"similarity": 0.9, "beyond": "review"}, "runs": {"similarity": 0.95, "beyond": "reject"}},
    "checks.secrets": "note",
    "routing.gate": "coverage",
}


def main() -> int:
    """Submit traces, kill workers, and check how each trace ended; write progress to stderr and a JSON summary to stdout."""
    parser = arguments(__doc__)
    parser.add_argument("--traces", type=int, default=2_000)
    parser.add_argument("--outcomes", type=int, default=600, help="late outcomes to send: before, with and after their traces")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=6.0, metavar="SECONDS")
    parser.add_argument("--gated", action="store_true", help="with the gate of coverage, pinned sets and a check")
    return perform(parser.parse_args(), _kill_and_check)


def _kill_and_check(arena: Arena, chosen: argparse.Namespace) -> dict[str, Any]:
    chance, started = random.Random(chosen.seed), time.monotonic()
    changed = {"embedding.threads": 1, "broker.timeout_s": 10.0} | (_GATED if chosen.gated else {})
    settings = arena.settings(**changed)
    load, submitted, violation = list(traces(chosen.traces, chance)), list[str](), None
    late = LateOutcomes(load, chosen.outcomes, chance)
    if chosen.gated:
        pinned = load[:2_000:20]
        tasks = (" ".join(trace["task"]["objective"].split()) for trace in pinned)
        run_command("cache", "pin", "tasks", "-", settings=settings, stdin="\n".join(tasks))
        run_command("cache", "pin", "runs", "-", settings=settings, stdin="\n".join(map(json.dumps, pinned)))
    with Fleet(settings, arena.directory / "logs", chosen.workers, KP_SCORER_WORKER, supervised=True) as fleet:
        with Client(settings) as client:
            fleet.wait_until_ready()
            next_kill = time.monotonic() + chosen.kill_every
            while arena.waiting() or len(submitted) < len(load):
                if arena.waiting() < _IN_QUEUE:
                    put(settings, *late.due(len(submitted) + _CHUNK))
                    submitted += submit(client, load[len(submitted) : len(submitted) + _CHUNK])
                time.sleep(0.1)
                if time.monotonic() >= next_kill:
                    next_kill += chosen.kill_every
                    fleet.kill(chance.randrange(chosen.workers))
                    say(f"{len(submitted)} submitted, {len(fleet.ends)} killed")
        try:
            put(settings, *late.due(sys.maxsize))
            wait_until_ended(settings, late.trace_ids)
            arena.finish(fleet, submitted, revised=late.trace_ids)
            run_command("audit", settings=settings)
        except AssertionError as error:
            violation = str(error)
        kills = fleet.ends.count(-9)
    seconds = round(time.monotonic() - started)
    counts = {"submitted": len(submitted), "outcomes": len(late.trace_ids), "kills": kills}
    return {**counts, "seconds": seconds, "violation": violation}


if __name__ == "__main__":
    sys.exit(main())
