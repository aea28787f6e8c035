"""Whatever is pushed onto the queue's list, the worker stays up, and each item ends as one decision or one dead letter."""

import base64
import binascii
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings

from tests.fuzz.messages import items
from tests.support.processes import FAST_WORKER, Worker, start_worker, wait_until

SEED: Final = int(os.environ.get("FUZZ_SEED", "20261121"))
COUNT: Final = 1_400


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_item_of_the_list_ends_as_one_decision_or_one_dead_letter(
    settings: Settings, store: Store, redis_client: redis.Redis, tmp_path: Path
) -> None:
    trace_ids = {raw.item: raw.trace_id for raw in items(COUNT, SEED)}
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(settings) as client:
        for item in trace_ids:
            redis_client.lpush(settings.queues.traces, item)
        wait_until(lambda: _has_ended(worker) or _is_quiet(redis_client, settings), timeout_s=60)
        assert not _has_ended(worker), f"FUZZ_SEED={SEED}: {worker.process.poll()}\n{worker.text()[-3_000:]}"
        dead_letters = store.dead_letters
        payloads = {entry.letter_id: dead_letters.payload(entry.letter_id) for entry in dead_letters.read()}
        statuses = client.look_up(list(trace_ids.values()))
    decided = {status.trace_id for status in statuses if status and status.state == "decided"}
    assert len(decided) > COUNT / 10
    index = DeadLetterIndex(payloads)
    ids_by_item = {item: index.ids_of(item) for item in trace_ids}
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


def _is_quiet(redis_client: redis.Redis, settings: Settings) -> bool:
    queue = settings.queues.traces
    return not any((redis_client.llen(queue), redis_client.llen(f"{queue}.taking"), redis_client.hlen(f"{queue}.in_hand")))


class DeadLetterIndex:
    """An index of dead letters by the bytes of the items that they store."""

    def __init__(self, payloads: Mapping[str, bytes]) -> None:
        """Index payloads, which are by the ids of their dead letters."""
        self._ids: defaultdict[bytes, set[str]] = defaultdict(set)
        for dead_id, payload in payloads.items():
            for form in {payload, _meaning(payload)}:
                self._ids[form].add(dead_id)

    def ids_of(self, item: bytes) -> set[str]:
        """Ids of the dead letters that keep all that an item carried: the item itself, its body, or the trace in it."""
        return {dead_id for form in _forms(item) for dead_id in self._ids.get(form, ())}


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
    with _deep_recursion():
        try:
            return json.loads(raw.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            return None


def _canonical(value: Any) -> bytes:
    with _deep_recursion():
        return json.dumps(value, sort_keys=True).encode()


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Parse here, on pytest's deeper stack, what a worker can parse."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
