"""Whatever is pushed onto the queue's list, the worker stays up, and each item ends as one decision or one dead letter."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.accounting import Kept
from tests.support.messages import Raw, bodies, garbage
from tests.support.processes import FAST_WORKER, Worker, start_worker, wait_until

SEED: Final = int(os.environ.get("FUZZ_SEED", "20261121"))
COUNT: Final = 1_000


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("make", [bodies, garbage])
def test_every_item_of_the_list_ends_as_one_decision_or_one_dead_letter(
    make: Callable[[int, int], Iterator[Raw]], settings: Settings, store: Store, redis_client: redis.Redis, tmp_path: Path
) -> None:
    items = {raw.item: raw.trace_id for raw in make(COUNT, SEED)}
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(settings) as client:
        for item in items:
            redis_client.lpush(settings.queues.traces, item)
        wait_until(lambda: _has_ended(worker) or _is_quiet(redis_client, settings), timeout_s=60)
        assert not _has_ended(worker), f"FUZZ_SEED={SEED}: {worker.process.poll()}\n{worker.text()[-3_000:]}"
        letters = store.dead_letters
        payloads = {letter.letter_id: letters.payload(letter.letter_id) for letter in letters.read()}
        statuses = client.look_up(list(items.values()))
    decided = {status.trace_id for status in statuses if status and status.state == "decided"}
    assert len(decided) > COUNT / 10
    kept = Kept(payloads)
    found = {item: kept.of(item) for item in items}
    claims = Counter(letter_id for letter_ids in found.values() for letter_id in letter_ids)
    # Items that differ in nothing but their envelopes are one dead letter.
    own = {item: [letter_id for letter_id in letter_ids if claims[letter_id] == 1] for item, letter_ids in found.items()}
    lost = [trace_id for item, trace_id in items.items() if trace_id not in decided and not found[item]]
    twice = [trace_id for item, trace_id in items.items() if len(own[item]) + (trace_id in decided) > 1]
    assert (lost, twice) == ([], []), f"FUZZ_SEED={SEED}: items that ended neither way, and items that ended twice"
    assert payloads.keys() == claims.keys()


def _has_ended(worker: Worker) -> bool:
    """It went down, or in circles: what nobody could ever handle, given back again and again."""
    return worker.process.poll() is not None or len(worker.events("message_given_back")) > 10


def _is_quiet(redis_client: redis.Redis, settings: Settings) -> bool:
    queue = settings.queues.traces
    return not any((redis_client.llen(queue), redis_client.llen(f"{queue}.taking"), redis_client.hlen(f"{queue}.in_hand")))
