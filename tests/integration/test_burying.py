"""Which submission a message speaks for that gets no decision, and that each has one dead letter, whatever it is buried for."""

import json
from collections.abc import Callable
from typing import Any, Final

import pytest
import redis
from kombu.message import Message
from kp_scorer.broker.burying import bury_poison, bury_unread
from kp_scorer.broker.task_body import task_body
from kp_scorer.broker.task_message import TASK_NAME, parse_submission
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_json
from kp_scorer.process.settling import burial_of
from kp_scorer.store import Counts, Identity, Store, Submission, Tally, Verdict
from kp_scorer.store.keys import Keys

from tests.support.builders import decision_on, minimal_payload

TRACE_ID: Final = "kp:trace:minimal"
STRICT: Final = Limits(steps=1)
STRICTER: Final = Limits(values=1)

Bury = Callable[[Store, Any], Decision | None]


def submission(**changed: Any) -> bytes:
    """A valid trace as our client sends it, which no other serializer would write like this."""
    unknown: dict[str, Any] = {"unknown": [{}] * 100}
    return json.dumps(minimal_payload() | unknown | changed, separators=(", ", ":"), ensure_ascii=False).encode()


def message(body: bytes) -> Any:
    headers = {"task": TASK_NAME, "id": TRACE_ID}
    return Message(body=body, content_type="application/json", headers=headers, delivery_info={})


def digest_of(payload: bytes) -> bytes:
    return decode_json(payload, Limits()).digest()


@pytest.fixture
def noted(store: Store) -> bytes:
    """A valid trace that a client has noted."""
    payload = submission()
    assert store.ledger.open([Submission(TRACE_ID, digest_of(payload), payload)]) == ["pending"]
    return payload


def refused(store: Store, sent: Any) -> Decision | None:
    """By a worker that parses it, and whose limits it does not keep."""
    return burial_of(sent, TRACE_ID, "invalid", "steps: too many", store.dead_letters, STRICT).bury()


def unread(store: Store, sent: Any) -> Decision | None:
    """By a worker that does not parse it."""
    return bury_unread(store.dead_letters, sent, "invalid", "$: too many values", TRACE_ID)


def poisonous(store: Store, sent: Any) -> Decision | None:
    return bury_poison(store.dead_letters, sent, 6, Limits())


def poisonous_unread(store: Store, sent: Any) -> Decision | None:
    return bury_poison(store.dead_letters, sent, 6, STRICTER)


def failed(store: Store, sent: Any) -> Decision | None:
    digest = digest_of(submission())
    return burial_of(sent, TRACE_ID, "scoring_failed", "ValueError", store.dead_letters, Limits(), digest).bury()


def lost(store: Store, _: Any) -> Decision | None:
    """By the reconciler, which has only what the client noted."""
    payload = submission()
    return store.dead_letters.bury(payload, "lost", "sent 4 times", TRACE_ID, digest_of(payload), deliveries=0)


WAYS: Final = (refused, unread, poisonous, poisonous_unread, failed, lost)


def state_of(store: Store, trace_id: str = TRACE_ID) -> str:
    (record,) = store.ledger.look_up([trace_id])
    return record.state if record else ""


def test_what_is_large_for_its_escapes_and_spaces_is_known_for_what_it_is(store: Store) -> None:
    limits = Limits(message_bytes=2_000)
    small = submission(unknown=["\u00e9" * 400])
    large = json.dumps(json.loads(small), indent=8).encode()
    assert len(small) < limits.message_bytes < len(large)
    store.ledger.begin([Identity(TRACE_ID, digest_of(small))])
    plain: Any = Message(body=large, content_type="application/json", headers={}, delivery_info={})
    assert bury_poison(store.dead_letters, plain, 6, limits) is None
    (letter,) = store.dead_letters.read()
    assert parse_submission(store.dead_letters.payload(letter.letter_id), limits) == json.loads(small)
    assert state_of(store) == "dead"
    assert store.ledger.counts() == Counts(submitted=1, pending=0, decided=0, dead=1)


def test_a_hash_that_was_left_of_another_content_ends_nothing(
    store: Store, noted: bytes, redis_client: redis.Redis, keys: Keys
) -> None:
    left: Any = redis_client.hget(keys.record(TRACE_ID), "as_letter")
    assert refused(store, message(task_body(noted))) is None
    other = submission(outcome={"result_summary": "mended", "confidence": 1.0})
    store.ledger.open([Submission(TRACE_ID, digest_of(other), other)])
    # As a client of version 0.1.0 leaves it.
    redis_client.hset(keys.record(TRACE_ID), "as_letter", left)
    assert refused(store, message(task_body(noted))) is None
    assert state_of(store) == "pending"


def test_what_a_client_of_version_0_1_0_noted_ends_by_its_bytes(
    store: Store, noted: bytes, redis_client: redis.Redis, keys: Keys
) -> None:
    redis_client.hdel(keys.record(TRACE_ID), "as_letter")
    assert refused(store, message(task_body(noted))) is None
    assert state_of(store) == "dead"
    assert store.ledger.counts() == Counts(submitted=1, pending=0, decided=0, dead=1)


def decide(store: Store) -> None:
    digest = digest_of(submission())
    store.ledger.begin([Identity(TRACE_ID, digest)])
    store.ledger.commit([Verdict(TRACE_ID, digest, decision_on(TRACE_ID), "", Tally("code", is_known=True))])


@pytest.mark.parametrize("then", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_a_submission_has_one_letter_whatever_it_is_buried_for(store: Store, noted: bytes, first: Bury, then: Bury) -> None:
    for bury in (first, then):
        assert bury(store, message(task_body(noted))) is None
        (letter,) = store.dead_letters.read()
        assert store.dead_letters.payload(letter.letter_id) == noted
        assert letter.trace_id == TRACE_ID
        assert state_of(store) == "dead"
        assert store.ledger.counts() == Counts(submitted=1, pending=0, decided=0, dead=1)
    assert store.dead_letters.drop(letter)
    assert state_of(store) == ""


@pytest.mark.parametrize("bury", WAYS)
def test_another_copy_of_what_is_decided_leads_to_the_decision(store: Store, noted: bytes, bury: Bury) -> None:
    decide(store)
    decision = bury(store, message(task_body(noted)))
    assert decision
    assert decision.trace_id == TRACE_ID
    assert list(store.dead_letters.read()) == []
    assert store.ledger.counts() == Counts(submitted=1, pending=0, decided=1, dead=0)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"metadata": minimal_payload()["metadata"] | {"success": 1}}, id="1 for true"),
        pytest.param({"steps": [{"step_id": 0.0, "type": "thought"}, {"step_id": 1, "type": "observation"}]}, id="0.0 for 0"),
        pytest.param(
            {"steps": [{"step_id": False, "type": "thought"}, {"step_id": 1, "type": "observation"}]}, id="false for 0"
        ),
        pytest.param({"steps": []}, id="another content"),
    ],
)
def test_what_is_another_submission_ends_none(store: Store, noted: bytes, changed: dict[str, Any]) -> None:
    other = submission(**changed)
    assert other != noted
    assert refused(store, message(task_body(other))) is None
    assert state_of(store) == "pending"
    (letter,) = store.dead_letters.read()
    assert store.dead_letters.payload(letter.letter_id) == other
    assert store.ledger.counts() == Counts(submitted=2, pending=1, decided=0, dead=1)


def test_a_call_by_others_keeps_what_it_says(store: Store) -> None:
    said = {"note": "\u00e9", "steps": []}
    for body in (
        json.dumps([[said], {}, {"callbacks": None}]),
        json.dumps([[], {"trace": said}, {}]),
        json.dumps({"args": [said], "kwargs": {}}),
    ):
        assert refused(store, message(body.encode())) is None
    (letter,) = store.dead_letters.read()
    assert json.loads(store.dead_letters.payload(letter.letter_id)) == said
    others = {b"[[1, 2], {}, {}]", b"[[], {}, {}]", b"[[1], {}", b"[[]], {}, {}]"}
    for raw in others:
        assert poisonous(store, message(raw)) is None
    kept = {store.dead_letters.payload(each.letter_id) for each in store.dead_letters.read()}
    assert others < kept


@pytest.mark.parametrize("name", ["", "kp:trace:other"])
def test_bytes_that_were_buried_by_no_name_or_another_end_the_trace_that_they_are(store: Store, name: str) -> None:
    payload = submission()
    store.dead_letters.bury(payload, "invalid", "not parsed", name)
    store.ledger.open([Submission(TRACE_ID, digest_of(payload), payload)])
    assert failed(store, message(task_body(payload))) is None
    (letter,) = store.dead_letters.read()
    assert (letter.trace_id, letter.reason, letter.burials) == (TRACE_ID, "scoring_failed", 2)
    assert [state_of(store), state_of(store, "kp:trace:other")] == ["dead", ""]
    assert store.ledger.counts() == Counts(submitted=2, pending=0, decided=0, dead=2)
    # By a name that only its message bore, it is still that trace's.
    store.dead_letters.bury(payload, "invalid", "not parsed", "kp:trace:third")
    assert [state_of(store), state_of(store, "kp:trace:third")] == ["dead", ""]
    (letter,) = store.dead_letters.read()
    assert store.dead_letters.drop(letter)
    assert state_of(store) == ""
