"""Whatever is pushed onto the queue's list, the worker stays up, and each item ends as one decision or one dead letter."""

import base64
import binascii
import json
import pickle
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from celery import Celery
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings

from tests.fuzz.mutations import SEED, base_texts, damaged, mutated_payload, odd_value
from tests.support.arena import is_drained
from tests.support.processes import FAST_WORKER, Worker, start_worker, wait_until

COUNT: Final = 1_400

Envelope = dict[str, Any]

_PRODUCER: Final = Celery("producer", set_as_current=False)
_PROPERTIES: Final[Envelope] = {
    "delivery_info": {"exchange": "", "routing_key": "traces"},
    "delivery_mode": 2,
    "priority": 0,
    "body_encoding": "base64",
}


def message(trace: Any, token: str) -> Envelope:
    """What a Celery 5 app sends, as the Redis transport carries it."""
    sent = _PRODUCER.amqp.as_task_v2(token, TASK_NAME, [trace], argsrepr="(trace,)", origin="gen1@host", ignore_result=True)
    return {
        "body": encoded(sent.body),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": sent.headers,
        "properties": _PROPERTIES | sent.properties | {"delivery_tag": token},
    }


def encoded(body: Any) -> str:
    """A body as the Redis transport carries it."""
    return base64.b64encode(json.dumps(body).encode()).decode()


def items(count: int, seed: int) -> Iterator[tuple[bytes, str]]:
    """Good messages, odd ones, broken ones, and items that are no messages at all, in turns.

    Each is an item of the list, with the trace id that a decision on it would have.
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
    """Nesting about as deep as Python can parse: just under what stops the parser, it must not stop what comes after."""
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


@pytest.fixture
def deep_recursion() -> Iterator[None]:
    """Parse here, on pytest's deeper stack, what a worker can parse."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5_000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("deep_recursion")
def test_every_item_of_the_list_ends_as_one_decision_or_one_dead_letter(
    settings: Settings, store: Store, redis_client: redis.Redis, tmp_path: Path
) -> None:
    trace_ids = dict(items(COUNT, SEED))
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(settings) as client:
        for item in trace_ids:
            redis_client.lpush(settings.queues.traces, item)
        wait_until(lambda: _has_ended(worker) or is_drained(redis_client, settings.queues.traces), timeout_s=60)
        assert not _has_ended(worker), f"FUZZ_SEED={SEED}: {worker.process.poll()}\n{worker.text()[-3_000:]}"
        dead_letters = store.dead_letters
        payloads = {entry.letter_id: dead_letters.payload(entry.letter_id) for entry in dead_letters.read()}
        statuses = client.look_up(list(trace_ids.values()))
    decided = {status.trace_id for status in statuses if status and status.state == "decided"}
    assert len(decided) > COUNT / 10
    ids_by_item = dead_letters_by_item(trace_ids, payloads)
    claims = Counter(dead_id for dead_ids in ids_by_item.values() for dead_id in dead_ids)
    # Items that differ in nothing but their envelopes are one dead letter.
    own = {item: [dead_id for dead_id in dead_ids if claims[dead_id] == 1] for item, dead_ids in ids_by_item.items()}
    lost = [trace_id for item, trace_id in trace_ids.items() if trace_id not in decided and not ids_by_item[item]]
    twice = [trace_id for item, trace_id in trace_ids.items() if len(own[item]) + (trace_id in decided) > 1]
    assert (lost, twice) == ([], []), f"FUZZ_SEED={SEED}: items that ended neither way, and items that ended twice"
    assert payloads.keys() == claims.keys()


def _has_ended(worker: Worker) -> bool:
    """Whether it has died, or requeues the same messages over and over."""
    return worker.process.poll() is not None or len(worker.events("message_requeued")) > 10


def dead_letters_by_item(sent: Iterable[bytes], payloads: Mapping[str, bytes]) -> dict[bytes, set[str]]:
    """Ids of the dead letters that keep all that an item carried: the item itself, its body, or the trace in it."""
    ids: defaultdict[bytes, set[str]] = defaultdict(set)
    for dead_id, payload in payloads.items():
        for form in {payload, _meaning(payload)}:
            ids[form].add(dead_id)
    return {item: {dead_id for form in _forms(item) for dead_id in ids.get(form, ())} for item in sent}


def _forms(item: bytes) -> Iterator[bytes]:
    yield item
    envelope = _parsed(item)
    if isinstance(envelope, dict):
        # It may be a submission itself.
        yield _canonical(envelope)
    body = envelope.get("body") if isinstance(envelope, dict) else None
    if not isinstance(body, str):
        return
    raw = body.encode("utf-8", "surrogatepass")
    yield raw
    try:
        raw = base64.b64decode(raw)
    except binascii.Error:
        pass
    else:
        yield raw
    yield from map(_canonical, _submissions(_parsed(raw)))


def _submissions(body: Any) -> Iterator[Any]:
    """What may be the submission in a body: the only argument, or all arguments."""
    match body:
        case [list() as args, dict() as kwargs, _]:
            pass
        case dict() if body.keys() & {"args", "kwargs"}:
            yield body
            args, kwargs = body.get("args", []), body.get("kwargs", {})
        case dict():
            yield body
            return
        case _:
            return
    yield {"args": args, "kwargs": kwargs}
    if isinstance(args, list) and len(args) == 1 and not kwargs:
        yield args[0]
    if not args and isinstance(kwargs, dict) and list(kwargs) == ["trace"]:
        yield kwargs["trace"]


def _meaning(raw: bytes) -> bytes:
    parsed = _parsed(raw)
    return raw if parsed is None else _canonical(parsed)


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
