"""Whatever is pushed onto the queue's list, the worker stays up, and each item ends as one decision or one dead letter."""

import base64
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from celery import Celery
from kp_scorer.broker.wire import TASK_NAME, open_item
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.fuzz.mutations import SEED, base_texts, damaged, mutated_payload, odd_value
from tests.support.arena import is_drained
from tests.support.processes import FAST_WORKER, Worker, start_worker, wait_until

COUNT: Final = 450

Envelope = dict[str, Any]

_PRODUCER: Final = Celery("producer", set_as_current=False)
_PROPERTIES: Final[Envelope] = {
    "delivery_info": {"exchange": "", "routing_key": "traces"},
    "delivery_mode": 2,
    "priority": 0,
    "body_encoding": "base64",
}


def message(trace: Any, token: str) -> Envelope:
    """Return a Celery 5 app's message as the Redis transport carries it."""
    sent = _PRODUCER.amqp.as_task_v2(token, TASK_NAME, [trace], argsrepr="(trace,)", origin="gen1@host", ignore_result=True)
    return {
        "body": encoded(sent.body),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": sent.headers,
        "properties": _PROPERTIES | sent.properties | {"delivery_tag": token},
    }


def encoded(body: Any) -> str:
    """Return a body as the Redis transport carries it."""
    return base64.b64encode(json.dumps(body).encode()).decode()


def items(count: int, seed: int) -> Iterator[tuple[bytes, str]]:
    """Yield good messages, odd ones, broken ones, and items that are not messages at all, in turn.

    Each comes as an item of the queue's list, with the trace id that a decision on it would have.
    """
    makers: tuple[Callable[[random.Random, Any, str], Any], ...] = (
        lambda chance, trace, token: message(trace, token),
        lambda chance, trace, token: message(mutated_payload(chance, json.dumps(trace)), token),
        _odd_body,
        _odd_part,
        lambda chance, trace, token: mutated_payload(chance, json.dumps(message(trace, token))),
        _deep,
        lambda chance, trace, token: damaged(chance, json.dumps(message(trace, token)).encode()),
        _damaged_base64,
        _no_envelope,
    )
    bases = base_texts()
    for number in range(count):
        chance = random.Random(f"{seed}:{number}")
        token = f"fuzz-{seed}-{number:06}"
        trace = json.loads(chance.choice(bases)) | {"id": f"kp:trace:{token}"}
        made = makers[number % len(makers)](chance, trace, token)
        yield made if isinstance(made, bytes) else json.dumps(made).encode("utf-8", "surrogatepass"), trace["id"]


def _odd_body(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    body = chance.choice(
        (
            [[trace, trace], {}, {}],
            [[], {"trace": trace}, {}],
            [[], {"trace": trace, "more": odd_value(chance)}, {}],
            [[trace], {"token": token}, None],
            [trace, {}, {}],
            [[trace], [], {}],
            [[trace]],
            {"args": [trace]},
            trace,
            [token],
            token,
            mutated_payload(chance, json.dumps([[trace], {}, {"chord": None}])),
        )
    )
    return message(None, token) | {"body": encoded(body)}


def _odd_part(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    made = message(trace, token)
    part = chance.choice(("headers", "properties"))
    return made | {part: mutated_payload(chance, json.dumps(made[part]))}


def _deep(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    """Return a message nested about as deep as Python can parse: what the parser just accepts must not break later steps."""
    made = message(None, token)
    depth = chance.choice((*range(880, 1_000, 4), 2_000, 20_000))
    inside = "[" * depth + json.dumps(token) + "]" * depth
    body = f'[[{{"id": {json.dumps(trace["id"])}, "input": {inside}}}], {{}}, {{}}]'
    return made | {"body": base64.b64encode(body.encode()).decode()}


def _damaged_base64(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    made = message(trace, token)
    text = made["body"]
    at = chance.randrange(len(text))
    inserted = [text[:at] + odd + text[at:] for odd in ("\ud800", "*", "=", "\u0660")]
    made["body"] = chance.choice((*inserted, text[:at], text[1:], token, ""))
    return made


def _no_envelope(chance: random.Random, trace: dict[str, Any], token: str) -> bytes:
    raw = json.dumps(trace).encode()
    return chance.choice(
        (
            raw,
            token.encode(),
            b"%s\xff\xfe" % token.encode(),
            json.dumps(token).encode(),
            json.dumps([token]).encode(),
            json.dumps([message(trace, token)]).encode(),
            json.dumps({"trace": trace}).encode(),
            b"[" * 900 + json.dumps(token).encode() + b"]" * 900,
            b"[" * 100_000 + token.encode(),
            b"\0" * 10_000_000 + token.encode(),
            pickle.dumps(trace),
            str(int.from_bytes(token.encode(), "big")).encode(),
            f"null{' ' * int(token[-6:])}".encode(),
            f"[]{' ' * int(token[-6:])}".encode(),
            f"{{}}{' ' * int(token[-6:])}".encode(),
            b" " * int(token[-6:]),
        )
    )


def test_every_item_of_the_list_ends_as_one_decision_or_one_dead_letter(
    settings: Settings, store: Store, redis_client: redis.Redis, tmp_path: Path
) -> None:
    sent = dict(items(COUNT, SEED))
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker:
        for item in sent:
            redis_client.lpush(settings.queues.first, item)
        wait_until(lambda: _has_ended(worker) or is_drained(redis_client, settings.queues.first))
        assert not _has_ended(worker), f"FUZZ_SEED={SEED}: {worker.process.poll()}\n{worker.text()[-3_000:]}"
    records = zip(sent.values(), store.ledger.look_up(list(sent.values())), strict=True)
    decided = {trace_id for trace_id, record in records if record and record.state == "decided"}
    assert len(decided) > COUNT / 10
    letters = list(store.dead_letters.read())
    # Items that differ only in their envelopes are one dead letter. The hostile tier shows what a dead letter must keep.
    dead = sum(letter.occurrences for letter in letters)
    assert len(decided) + dead == len(sent), f"FUZZ_SEED={SEED}: {len(decided)} decided and {dead} dead"
    twice = decided & {letter.trace_id for letter in letters if letter.reason != "conflict"}
    assert twice == set(), f"FUZZ_SEED={SEED}: both decided and dead"


@pytest.mark.parametrize("odd", ["*", "=", "\u0660", "\ud800"])
def test_a_body_that_is_not_base64_is_refused_as_a_whole(odd: str) -> None:
    made = message({}, "odd")
    made["body"] = made["body"][:5] + odd + made["body"][5:]
    with pytest.raises(ValueError):  # noqa: PT011  # base64's own
        open_item(json.dumps(made).encode())


def _has_ended(worker: Worker) -> bool:
    """Return whether the worker has died, or requeues the same messages over and over."""
    return worker.process.poll() is not None or len(worker.events("message_requeued")) > 10
