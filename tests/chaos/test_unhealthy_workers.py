"""Workers lose no trace when they end, whether with exit code 4 because they are unhealthy or on SIGTERM under load."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import pytest
from kp_scorer.client import Client
from kp_scorer.settings.loading import as_environment

from tests.support.arena import Arena, submit, supervised, traces
from tests.support.fleet import Fleet
from tests.support.processes import FAST_WORKER, PATIENCE_S, ending_within, launch_worker, wait_until

EXIT_CODE: Final = 4
FEW: Final = 40
SMALL_PASSES: Final = {"worker__concurrency": 12}
"""A pass has at most two groups of this size, so that there are enough passes to find the embedder unhealthy."""


@pytest.mark.slow
@pytest.mark.parametrize(("broker", "unhealthy_from"), [("redis", "1"), ("rabbitmq", "4")], indirect=["broker"])
def test_a_panic_ends_the_process_and_another_decides(arena: Arena, unhealthy_from: str) -> None:
    def panic_once(place: int, life: int) -> Mapping[str, str]:
        return {"FAILURE": "panics", "FAILS_FROM": unhealthy_from} if life == 0 else {}

    settings = arena.settings(**SMALL_PASSES)
    with Client(settings) as client:
        submitted = submit(client, traces(FEW))
        with Fleet(settings, arena.directory, 1, FAST_WORKER, panic_once, supervised=True) as fleet:
            unhealthy = fleet[0]
            wait_until(lambda: fleet.ends)
            arena.finish(fleet, submitted)
            assert fleet.ends == [EXIT_CODE]
    assert [(line["thread"], line["error"]) for line in unhealthy.events("thread_died")] == [("stream-0", "Panic")]
    assert [line["stalled"] for line in unhealthy.events("worker_stalled")] == ["stream-0"]
    assert "unwrap" not in unhealthy.text(), "the message of an error may quote a trace"


UNMAINTAINED: Final = """
from kp_scorer.store.ledger import RedisLedger
from tests.support.fast_worker import run

def renew(self, report):
    raise SystemExit("no more of this")

RedisLedger.renew = renew
run()
"""


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_maintenance_thread_that_dies_ends_the_process(arena: Arena) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNMAINTAINED],
        env=os.environ | as_environment(arena.settings()),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == EXIT_CODE, done.stderr
    assert '"stalled": "lease_renewer"' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("broker", "failure"), [("redis", "fails"), ("rabbitmq", "no numbers")], indirect=["broker"])
def test_an_unhealthy_embedder_ends_its_worker_and_loses_no_trace(arena: Arena, failure: str) -> None:
    def unhealthy_beside_healthy(place: int, life: int) -> Mapping[str, str]:
        # The worker has decided some traces when it becomes unhealthy, and has more in flight.
        return {"FAILURE": failure, "FAILS_FROM": "3"} if (place, life) == (0, 0) else {"EMBED_S": "0.1"}

    settings = arena.settings(**SMALL_PASSES)
    with Fleet(settings, arena.directory, 2, FAST_WORKER, unhealthy_beside_healthy, supervised=True) as fleet:
        fleet.wait_until_ready()
        unhealthy = fleet[0]
        with Client(settings) as client:
            submitted = submit(client, traces())
        wait_until(lambda: fleet.ends)
        arena.finish(fleet, submitted)
        assert fleet.ends == [EXIT_CODE]
    assert len(unhealthy.events("embedder_unhealthy")) == 1
    assert unhealthy.events("worker_stopped"), "it did not stop gracefully"
    assert not unhealthy.events("scoring_failed")


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_an_embedder_that_embeds_nothing_but_the_probe_loses_few_traces(arena: Arena) -> None:
    settings = arena.settings()
    worker = launch_worker(settings, arena.directory / "unhealthy.log", FAST_WORKER, {"FAILURE": "picky"})
    worker.wait_until_ready()
    with Client(settings) as client:
        submitted = submit(client, traces())
        assert worker.process.wait(PATIENCE_S) == EXIT_CODE
        assert len(worker.events("embedder_unhealthy")) == 1
        dead = [status.trace_id for status in client.look_up(submitted) if status and status.state == "dead"]
        assert len(dead) <= 2 * settings.worker.batch_size
        with Fleet(settings, arena.directory, 1, FAST_WORKER, supervised=True) as fleet:
            arena.finish(fleet, submitted, dead)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("embed_s", "grace_s"), [pytest.param("0.3", 20.0, id="time to finish"), pytest.param("1.5", 6.0, id="no time to finish")]
)
def test_sigterm_with_messages_in_flight(arena: Arena, embed_s: str, grace_s: float) -> None:
    settings = arena.settings(worker__grace_s=grace_s)
    with Client(settings) as client:
        submitted = submit(client, traces())
        with supervised(settings, arena.directory, 2, lambda place, life: {"EMBED_S": embed_s}) as fleet:
            fleet.wait_until_ready()
            wait_until(lambda: fleet.logged("trace_decided"))
            with ending_within(grace_s + 2):
                assert fleet.stop() == [0, 0]
        assert not all(status and status.decision for status in client.look_up(submitted)), "nothing was left to do"
        with supervised(settings, arena.directory / "second", 2) as fleet:
            arena.finish(fleet, submitted)
