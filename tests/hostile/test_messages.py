"""A producer causes a decision or a dead letter for its own message and nothing else, whatever it writes around its trace."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import pytest
from amqp.exceptions import NotFound
from kombu import Connection
from kp_scorer.broker.wire import BEGINNING_BYTES, largest_body_bytes
from kp_scorer.client import Client
from kp_scorer.store import Store

from tests.hostile.conftest import ShippedArena
from tests.support.arena import Arena
from tests.support.attacks import ELSEWHERE, MARKER, Attack, attacks, broker_attacks, open_queue, plain, squatting
from tests.support.fleet import Fleet
from tests.support.processes import PATIENCE_S, ending_within
from tests.support.traces import short_traces

AT_ONCE: Final = 50
"""The number of attacks before each honest trace."""

HONEST_WAITS_S: Final = 10.0
"""The longest time that an honest trace may take; most take a tenth of a second."""

RESIDENT_BYTES: Final = 300 * 2**20
"""A worker takes 117 to 144 MiB in these tests; a message unpacked without a bound would take 256 MiB more."""


@pytest.mark.slow
def test_a_producer_harms_nothing_but_its_own_message(shipped_arena: ShippedArena, fleet: Fleet) -> None:
    (worker,), arena = fleet, shipped_arena
    messages = list(chain(list(attacks())[arena.share], broker_attacks(arena, plain())))
    honest = _attack(arena, messages)
    assert worker.peak_bytes() < RESIDENT_BYTES
    decided = {attack.trace_id for attack in messages} - {""}
    # A body that is cut arrives without its headers, and so without its trace id.
    dead = {attack.dead_id for attack in messages if _stored_body(arena, attack.body) == attack.body} - {""}
    arena.finish(fleet, [*(str(trace["id"]) for trace in honest), *decided, *dead], dead)
    _nothing_went_elsewhere(arena)
    with Store.open(arena.settings()) as store:
        dead_letters = list(store.dead_letters.read())
        unread = [entry for entry in dead_letters if entry.reason != "conflict"]
        bodies = {store.dead_letters.payload(entry.letter_id) for entry in unread}
    assert bodies == {_stored_body(arena, attack.body) for attack in messages if not attack.trace_id}
    assert {entry.reason for entry in unread} == {"malformed", "invalid"}
    assert {entry.trace_id for entry in dead_letters if entry.reason == "conflict"} == {str(trace["id"]) for trace in honest}
    texts = [worker.text(), *(entry.detail for entry in dead_letters)]
    assert [text for text in texts if MARKER in text] == []


def _attack(arena: ShippedArena, messages: Sequence[Attack]) -> list[dict[str, Any]]:
    """Put all attacks on the queue. After each group, submit an honest trace, wait for its decision, and squat on its id."""
    honest = short_traces(len(messages) // AT_ONCE + 1, seed=13)
    with open_queue(arena) as put, Client(arena.settings_of("client")) as client:
        for number, trace in enumerate(honest):
            for attack in messages[number * AT_ONCE : (number + 1) * AT_ONCE]:
                put(attack)
            # A busy RabbitMQ may answer no one for seconds.
            client.submit(trace, timeout_s=PATIENCE_S)
            with ending_within(HONEST_WAITS_S):
                client.wait(str(trace["id"]), timeout_s=PATIENCE_S)
            put(squatting(trace))
    return honest


def _stored_body(arena: Arena, body: bytes) -> bytes:
    """Return the part of a body that a dead letter stores: all of it, or its beginning if RabbitMQ carried too large a body."""
    is_cut = arena.broker == "rabbitmq" and len(body) > largest_body_bytes(arena.settings().limits)
    return body[:BEGINNING_BYTES] if is_cut else body


def _nothing_went_elsewhere(arena: Arena) -> None:
    with arena.redis.connect() as client:
        names = {key.decode() for key in client.keys("*")}
    queues = arena.settings().queues
    ours = ("kp:", "unacked", queues.first, queues.name("accepted"), queues.name("rejected"))
    results = {name for name in names if re.fullmatch(r"celery-task-meta-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name)}
    assert {name for name in names - results if not name.startswith(ours)} == set()
    if arena.broker == "rabbitmq":
        with Connection(arena.settings().broker.url) as connection, connection.channel() as channel, pytest.raises(NotFound):
            channel.queue_declare(ELSEWHERE, passive=True)
