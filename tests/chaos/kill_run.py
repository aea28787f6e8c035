"""``python -m tests.chaos.kill_run --broker rabbitmq --traces 2000``: real workers, one killed every few seconds.

The traces are the reference's where they are at hand, else the samples; from the second time on with their words in another
order. It exits 1 unless every trace was decided once, as the novelty log gives it, and published.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kp_scorer.client import Client
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment

from tests.support.arena import Arena, submit
from tests.support.commands import run
from tests.support.fleet import Fleet
from tests.support.paths import REFERENCE_TRACES
from tests.support.processes import KP_SCORER_WORKER
from tests.support.rabbitmq import RABBITMQ_URL, own_queues, own_virtual_host
from tests.support.traces import new_id, sample_traces

_CHUNK = 50
_IN_QUEUE = 200
"""Few enough to last until the end of the run, so that every kill meets a worker with messages in flight."""
_GATED = {
    "novelty.against": "succeeded",
    # Of a set of texts an audit checks nothing: no log has the vectors that were compared.
    "novelty.pinned": {"tasks": {"similarity": 0.9, "beyond": "review"}, "runs": {"similarity": 0.95, "beyond": "reject"}},
    "checks.secrets": "note",
}


def main() -> int:
    """Submit, kill, wait for all ends and check them; progress goes to stderr, a summary as JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broker", choices=["redis", "rabbitmq"], default="redis")
    parser.add_argument("--traces", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=6.0, metavar="SECONDS")
    parser.add_argument("--gated", action="store_true", help="with novelty.against, a pinned set and checks.secrets on")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        own_virtual_host(RABBITMQ_URL) if chosen.broker == "rabbitmq" else nullcontext("") as url,
        Arena(chosen.broker, url, Path(directory), own_queues()) as arena,
    ):
        summary = _kill_and_check(arena, chosen)
    print(json.dumps(vars(chosen) | summary))  # noqa: T201
    return 1 if summary["violation"] else 0


def _kill_and_check(arena: Arena, chosen: argparse.Namespace) -> dict[str, Any]:
    chance, started = random.Random(chosen.seed), time.monotonic()
    changed = {"embedding.threads": 1, "broker.timeout_s": 10.0, "redis.timeout_s": 10.0} | (_GATED if chosen.gated else {})
    settings = arena.settings(**changed)
    load, submitted, violation = list(traces(chosen.traces, chance)), list[str](), None
    if chosen.gated:
        tasks = (" ".join(trace["task"]["objective"].split()) for trace in load[::20])
        _run("cache", "pin", "tasks", "-", settings=settings, stdin="\n".join(tasks))
        _run("cache", "pin", "runs", "-", settings=settings, stdin="\n".join(map(json.dumps, load[::20])))
    with Fleet(settings, arena.directory / "logs", chosen.workers, KP_SCORER_WORKER, supervised=True) as fleet:
        with Client(settings) as client:
            fleet.wait_until_ready()
            next_kill = time.monotonic() + chosen.kill_every
            while arena.waiting() or len(submitted) < len(load):
                if arena.waiting() < _IN_QUEUE:
                    submitted += submit(client, load[len(submitted) : len(submitted) + _CHUNK])
                time.sleep(0.1)
                if time.monotonic() >= next_kill:
                    next_kill += chosen.kill_every
                    fleet.kill(chance.randrange(chosen.workers))
                    print(f"{len(submitted)} submitted, {len(fleet.ends)} killed", file=sys.stderr)  # noqa: T201
        try:
            arena.finish(fleet, submitted)
            _run("audit", settings=settings)
        except AssertionError as error:
            violation = str(error)
        kills = fleet.ends.count(-9)
    return {"submitted": len(submitted), "kills": kills, "seconds": round(time.monotonic() - started), "violation": violation}


def _run(*arguments: str, settings: Settings, stdin: str = "") -> None:
    done = run(*arguments, stdin=stdin, **as_environment(settings))
    print(done.stderr, file=sys.stderr)  # noqa: T201
    assert done.returncode == 0, done.stderr


def traces(count: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    path = REFERENCE_TRACES / "traces.jsonl"
    templates = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else sample_traces()
    for place, trace in enumerate(itertools.islice(itertools.cycle(templates), count)):
        words = trace["task"]["objective"].split()
        objective = " ".join(chance.sample(words, len(words))) if place >= len(templates) else trace["task"]["objective"]
        yield trace | {"id": new_id(), "task": trace["task"] | {"objective": objective}}


if __name__ == "__main__":
    sys.exit(main())
