"""SIGTERM under load: the worker stops gracefully, completes or requeues what it has in flight, and ends in time."""

import time

import pytest
from kp_scorer.client import Client

from tests.support.arena import Arena, submit, supervised, traces
from tests.support.processes import wait_until


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
            started = time.monotonic()
            assert fleet.stop() == [0, 0]
            assert time.monotonic() - started < grace_s + 2
        assert not all(status and status.decision for status in client.look_up(submitted)), "nothing was left to do"
        with supervised(settings, arena.directory / "second", 2) as fleet:
            arena.finish(fleet, submitted)
