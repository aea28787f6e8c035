"""Messages that are small and would cost a worker much: it keeps them unparsed, and goes on with the others."""

import json
from itertools import chain
from pathlib import Path
from typing import Final

import redis
from kombu.message import Message
from kp_scorer.broker.dead_letters import DeadLettering, dead_letter
from kp_scorer.broker.wire import task_body
from kp_scorer.client import Client
from kp_scorer.decoding import Limits
from kp_scorer.ledger import Store
from kp_scorer.ledger.records import Record, Submission, dead_letter_id_of
from kp_scorer.settings import Settings

from tests.support.costly import filled
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.traces import fresh_samples, new_id

UNPARSED: Final = {
    "$: expected at most 20100 values": [filled("steps", "{}", 340_000), filled("unknown", "[[]]", 200_000)],
    # Python keeps a text with one such character at four bytes for each.
    "$: expected at most 1048576 bytes": [filled("unknown", f'"\U0001f600{filler * 2_000_000}"', 1) for filler in ", "],
    "$: expected numbers of at most 1000 digits": [filled("steps.0.input", "9" * 4_000, 250)],
}
INVALID: Final = {
    "$: expected at most 20000 values": filled("unknown", "0", 20_000),
    "steps: expected at most 2000 steps, got 2001": filled("steps", "{}", 2_001),
}


def body(submission: bytes) -> str:
    return f"[[{submission.decode()}],{{}},null]"


def envelope(submission: bytes) -> str:
    headers = {"task": "score_trace", "id": new_id()}
    fields = {"content-type": "application/json", "content-encoding": "utf-8", "headers": headers, "properties": {}}
    return json.dumps({"body": body(submission), **fields})


def test_costly_messages_end_as_dead_letters_and_others_are_decided(
    settings: Settings, store: Store, redis_client: redis.Redis, tmp_path: Path
) -> None:
    unparsed = {body(submission).encode(): detail for detail, sent in UNPARSED.items() for submission in sent}
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER), Client(settings) as client:
        for submission in [*chain(*UNPARSED.values()), *INVALID.values()]:
            redis_client.lpush(settings.queues.traces, envelope(submission))
        (trace,) = fresh_samples(1)
        assert client.wait(client.submit(trace), timeout_s=30)
        wait_until(lambda: len(list(store.dead_letters.read())) == len(unparsed) + len(INVALID))
    letters = list(store.dead_letters.read())
    assert {letter.reason for letter in letters} == {"invalid"}
    assert all(letter.trace_id for letter in letters)
    details = {store.dead_letters.payload(letter.letter_id): letter.detail for letter in letters}
    assert unparsed.items() <= details.items()
    assert set(details.values()) - set(unparsed.values()) == INVALID.keys()


def test_what_is_not_parsed_ends_no_other_submission(settings: Settings, store: Store) -> None:
    (trace,) = fresh_samples(1)
    trace_id, submission = str(trace["id"]), json.dumps(trace, ensure_ascii=False).encode()
    store.ledger.submit([Submission(trace_id, b"d" * 16, submission)])

    def record_after(body: bytes) -> Record | None:
        message = Message(body=body, content_type="application/json", headers={}, delivery_info={})
        dead_letter(store.dead_letters, message, DeadLettering("invalid", "too large", 1, trace_id), Limits(values=1))
        (record,) = store.ledger.look_up([trace_id])
        return record

    others = [[trace, trace], [trace | {"mood": 1}], [[trace]], [], [submission.decode()]]
    # The last is the same trace, in a body that was refused for what is beside it.
    for body in [json.dumps([args, {}, {}]).encode() for args in others] + [b'[[%s], {}, {"chain": 1}]' % submission]:
        record = record_after(body)
        assert record
        assert record.state == "pending"
    record = record_after(task_body(submission))
    assert record
    assert (record.state, record.reason) == ("dead", "invalid")
    assert store.dead_letters.payload(dead_letter_id_of(submission)) == submission
