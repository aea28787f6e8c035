"""Which submission a message that is no trace speaks for."""

import json
from typing import Any

import pytest
from kp_scorer.decoding import Limits, decode_json
from kp_scorer.process.settling import burial_of
from kp_scorer.store import Store, Submission

from tests.support.builders import minimal_payload


@pytest.fixture
def noted(store: Store) -> dict[str, Any]:
    """A valid trace that a client has noted."""
    payload = minimal_payload(success=True, confidence=1.0)
    trace = decode_json(json.dumps(payload).encode(), Limits())
    assert store.ledger.open([Submission(trace.id, trace.digest(), json.dumps(payload).encode())]) == ["pending"]
    return payload


def state_after_burying(store: Store, payload: dict[str, Any]) -> str:
    assert burial_of(payload, "invalid", "metadata.success: expected true or false", 1, store).bury() is None
    (record,) = store.ledger.look_up([str(payload["id"])])
    assert record is not None
    return record.state


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda payload: payload["metadata"].update(success=1), id="1 for true"),
        pytest.param(lambda payload: payload["steps"][0].update(step_id=0.0), id="0.0 for 0"),
        pytest.param(lambda payload: payload["steps"][0].update(step_id=False), id="false for 0"),
    ],
)
def test_what_python_takes_for_equal_ends_no_other_submission(store: Store, noted: dict[str, Any], changed: Any) -> None:
    payload = json.loads(json.dumps(noted))
    changed(payload)
    assert payload == noted
    assert state_after_burying(store, payload) == "pending"
    (letter,) = store.dead_letters.read()
    assert store.dead_letters.payload(letter.letter_id) == json.dumps(payload).encode()


def test_the_submission_itself_ends_whatever_the_order_of_its_fields(store: Store, noted: dict[str, Any]) -> None:
    assert state_after_burying(store, dict(reversed(noted.items()))) == "dead"
