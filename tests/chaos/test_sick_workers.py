"""A worker that can no longer do its work ends with exit code 4 and takes no trace along."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import pytest
from kp_scorer.client import Client
from kp_scorer.settings import as_environment

from tests.support.arena import Arena, submit, traces
from tests.support.fleet import Fleet
from tests.support.processes import launch_worker, wait_until
from tests.support.sick_worker import SICK_WORKER

EXIT_CODE: Final = 4
FEW: Final = 40


@pytest.mark.slow
@pytest.mark.parametrize("sick_from", ["1", "4"])
def test_a_panic_ends_the_process_and_another_decides(arena: Arena, sick_from: str) -> None:
    def panic_once(place: int, life: int) -> Mapping[str, str]:
        return {"SICKNESS": "panics", "SICK_FROM": sick_from} if life == 0 else {}

    settings = arena.settings()
    with Client(settings) as client:
        submitted = submit(client, traces(FEW))
        with Fleet(settings, arena.directory, 1, SICK_WORKER, panic_once, supervised=True) as fleet:
            sick = fleet[0]
            wait_until(lambda: fleet.ends)
            arena.finish(fleet, submitted)
            assert fleet.ends == [EXIT_CODE]
    assert [(line["thread"], line["error"]) for line in sick.events("thread_died")] == [("preparer", "Panic")]
    assert [line["stalled"] for line in sick.events("worker_stalled")] == ["preparer"]
    assert "unwrap" not in sick.text(), "what an error says may quote a trace"


UNMAINTAINED: Final = """
from kp_scorer.store import RedisLedger
from tests.support.fast_worker import run

def renew(self):
    raise SystemExit("no more of this")

RedisLedger.renew = renew
run()
"""


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_maintenance_thread_that_dies_ends_the_process(arena: Arena) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNMAINTAINED],
        env=os.environ | as_environment(arena.settings()) | {"KP_LOG_FORMAT": "json"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_CODE, done.stderr
    assert '"stalled": "renew_lease"' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sickness", ["fails", "no numbers"])
def test_a_sick_embedder_ends_its_worker_and_costs_no_trace(arena: Arena, sickness: str) -> None:
    def sick_beside_healthy(place: int, life: int) -> Mapping[str, str]:
        # It has decided some when it falls ill, and has more in hand.
        return {"SICKNESS": sickness, "SICK_FROM": "3"} if (place, life) == (0, 0) else {"EMBED_S": "0.1"}

    settings = arena.settings()
    with Fleet(settings, arena.directory, 2, SICK_WORKER, sick_beside_healthy, supervised=True) as fleet:
        fleet.wait_until_ready()
        sick = fleet[0]
        with Client(settings) as client:
            submitted = submit(client, traces())
        wait_until(lambda: fleet.ends)
        arena.finish(fleet, submitted)
        assert fleet.ends == [EXIT_CODE]
    assert len(sick.events("embedder_sick")) == 1
    assert sick.events("worker_stopped"), "it did not end in good order"
    assert not sick.events("scoring_failed")


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_an_embedder_that_embeds_nothing_but_the_probe_loses_few_traces(arena: Arena) -> None:
    settings = arena.settings()
    worker = launch_worker(settings, arena.directory / "sick.log", SICK_WORKER, {"SICKNESS": "picky"})
    worker.wait_until_ready()
    with Client(settings) as client:
        submitted = submit(client, traces())
        assert worker.process.wait(30) == EXIT_CODE
        assert len(worker.events("embedder_sick")) == 1
        dead = [status.trace_id for status in client.look_up(submitted) if status and status.state == "dead"]
        assert len(dead) <= 2 * settings.worker.batch_size
        with Fleet(settings, arena.directory, 1, SICK_WORKER, supervised=True) as fleet:
            arena.finish(fleet, submitted, dead)
