"""A producer causes a decision or a dead letter of its own message, and nothing more, whatever it writes around its trace."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import pytest
from amqp.exceptions import NotFound
from kombu import Connection
from kp_scorer.broker.task_body import BEGINNING_BYTES, largest_body_bytes
from kp_scorer.client import Client
from kp_scorer.store import Store

from tests.hostile.watching import Monitor
from tests.support.arena import Arena
from tests.support.attacking import broker_attacks, open_queue
from tests.support.attacks import ELSEWHERE, MARKER, Attack, attacks, plain, squatting
from tests.support.fleet import Fleet
from tests.support.traces import short_traces

AT_ONCE: Final = 50
"""Attacks before each honest trace."""

HONEST_WAITS_S: Final = 10.0
"""How long an honest trace may take at most; most take a tenth of a second."""

RESIDENT_BYTES: Final = 400 * 2**20


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_producer_harms_nothing_but_its_own_message(arena: Arena, fleet: Fleet) -> None:
    (worker,) = fleet
    made = list(chain(attacks(), broker_attacks(arena, plain())))
    with Monitor(fleet.settings) as monitor:
        honest = _attack(arena, fleet, made)
        assert worker.peak_bytes() < RESIDENT_BYTES
        decided = {attack.trace_id for attack in made} - {""}
        # What is cut comes without its headers, and with them its name.
        dead = {attack.dead_id for attack in made if _kept(arena, attack.body) == attack.body} - {""}
        arena.finish(fleet, [*(str(trace["id"]) for trace in honest), *decided, *dead], dead)
    _nothing_went_elsewhere(arena)
    with Store.open(arena.settings()) as store:
        letters = list(store.dead_letters.read())
        unread = [letter for letter in letters if letter.reason != "conflict"]
        bodies = {store.dead_letters.payload(letter.letter_id) for letter in unread}
    assert bodies == {_kept(arena, attack.body) for attack in made if not attack.trace_id}
    assert {letter.reason for letter in unread} == {"malformed", "invalid"}
    assert {letter.trace_id for letter in letters if letter.reason == "conflict"} == {str(trace["id"]) for trace in honest}
    assert fleet.logged("result_not_stored")
    assert monitor.shown("active")
    assert {event["type"] for event in monitor.events} >= {"task-received", "task-succeeded"}
    told = [worker.text(), monitor.text(), *(letter.detail for letter in letters)]
    assert [text for text in told if MARKER in text] == []


def _attack(arena: Arena, fleet: Fleet, made: Sequence[Attack]) -> list[dict[str, Any]]:
    """Put all attacks on the queue; after every so many submit an honest trace, wait for its decision, and squat on its id."""
    honest = short_traces(len(made) // AT_ONCE + 1, seed=13)
    with open_queue(arena) as put, Client(fleet.settings) as client:
        for number, trace in enumerate(honest):
            for attack in made[number * AT_ONCE : (number + 1) * AT_ONCE]:
                put(attack)
            # A busy RabbitMQ may answer no one for seconds.
            client.submit(trace, timeout_s=30)
            client.wait(str(trace["id"]), timeout_s=HONEST_WAITS_S)
            put(squatting(trace))
    return honest


def _kept(arena: Arena, body: bytes) -> bytes:
    """What a dead letter keeps of a body: from RabbitMQ no worker takes more of one that is too large than its beginning."""
    is_cut = arena.broker == "rabbitmq" and len(body) > largest_body_bytes(arena.settings().limits)
    return body[:BEGINNING_BYTES] if is_cut else body


def _nothing_went_elsewhere(arena: Arena) -> None:
    with arena.redis.connect() as client:
        # Answers to monitors may still lie there.
        names = {key.decode() for key in client.keys("*") if b".reply.celery.pidbox" not in key}
    queues = arena.settings().queues
    ours = ("kp:", "_kombu.", "unacked", queues.traces, queues.accepted, queues.rejected)
    assert {name for name in names if not name.startswith(ours)} == set()
    if arena.broker == "rabbitmq":
        with Connection(arena.settings().broker.url) as connection, connection.channel() as channel, pytest.raises(NotFound):
            channel.queue_declare(ELSEWHERE, passive=True)
