"""A store that does not answer, while the broker does, and malformed messages arrive beside good ones."""

from typing import Final

import pytest
from kp_scorer.client import Client
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings

from tests.chaos.test_network import endure
from tests.chaos.test_poison import put
from tests.support.arena import Arena, submit, supervised, traces
from tests.support.fleet import Fleet
from tests.support.processes import wait_until

FEW: Final = 15
SILENCE_S: Final = 10.0
"""Longer than every timeout, the visibility timeout, and what RabbitMQ forgives without a heartbeat."""


@pytest.mark.slow
def test_malformed_messages_wait_for_the_store_beside_the_connection(arena: Arena) -> None:
    settings = settings_with_store_behind_proxy(arena)
    with supervised(settings, arena.directory, 2) as fleet:
        fleet.wait_until_ready()
        arena.store_proxy.hold()
        bodies, submitted = send_good_and_malformed(arena)
        wait_until_all_wait(fleet)
        endure(SILENCE_S)
        arena.store_proxy.deliver()
        arena.finish(fleet, submitted)
        assert fleet.ends == []
        assert fleet.logged("connection_lost") == 0
    assert letters_in(arena) == sorted(("malformed", 1, body) for body in bodies)


@pytest.mark.slow
def test_sigterm_while_messages_wait_for_the_store(arena: Arena) -> None:
    settings = settings_with_store_behind_proxy(arena)
    with supervised(settings, arena.directory, 1) as fleet:
        fleet.wait_until_ready()
        arena.store_proxy.hold()
        bodies, submitted = send_good_and_malformed(arena)
        wait_until_all_wait(fleet)
        assert fleet.stop() == [0], fleet[0].text()[-2_000:]
        assert "Traceback" not in fleet[0].text()
    assert fleet.logged("message_waits") == len(bodies)
    arena.store_proxy.deliver()
    wait_until(lambda: arena.waiting() == len(bodies) + len(submitted))
    with supervised(arena.settings(), arena.directory / "second", 1) as fleet:
        arena.finish(fleet, submitted)


def letters_in(arena: Arena) -> list[tuple[str, int, bytes]]:
    """The reason, the deliveries and the bytes of all dead letters."""
    with Store.open(arena.settings()) as store:
        letters = list(store.dead_letters.read())
        return sorted((each.reason, each.deliveries, store.dead_letters.payload(each.letter_id)) for each in letters)


def settings_with_store_behind_proxy(arena: Arena) -> Settings:
    """Settings by which the broker is reached directly, even where both are one Redis."""
    return arena.settings(redis__url=arena.store_proxy.url)


def send_good_and_malformed(arena: Arena) -> tuple[list[bytes], list[str]]:
    """Send traces and malformed messages by turns; return the bodies of the one kind and the ids of the other."""
    bodies = [f"hello {number}".encode() for number in range(FEW)]
    submitted: list[str] = []
    with Client(arena.settings()) as client:
        for body, trace in zip(bodies, traces(FEW), strict=True):
            put(arena, body)
            submitted += submit(client, [trace])
    return bodies, submitted


def wait_until_all_wait(fleet: Fleet) -> None:
    """Wait until each message is in flight in a worker that got no answer from the store."""
    wait_until(lambda: fleet.logged("message_waits") >= FEW and fleet.logged("trace_waits") >= FEW)
