"""Messages are read as several versions of Celery sent them, recorded from kombu's in-memory transport."""

import json
from types import SimpleNamespace
from typing import Any, Final

import pytest
from kp_scorer.broker.headers import result_id
from kp_scorer.broker.rabbitmq import anew
from kp_scorer.broker.wire import arguments_in, open_item
from kp_scorer.limits import Limits

from tests.support.paths import REPOSITORY

RECORDED: Final = REPOSITORY / "tests" / "support" / "celery_messages.jsonl"
"""Calls of ``send_task`` by Celery 4.4 to 5.7: with each value of ``ignore_result``, without one, and by the first protocol."""

SENT: Final = [
    pytest.param(row, id=f"{row['celery']} {row['case']}") for row in map(json.loads, RECORDED.read_text("utf-8").splitlines())
]


def received(envelope: object) -> Any:
    item = open_item(json.dumps(envelope).encode())
    return SimpleNamespace(**item._asdict(), properties={}, delivery_info={})


@pytest.mark.parametrize("row", SENT)
def test_the_arguments_of_a_call_are_read(row: dict[str, Any]) -> None:
    assert arguments_in(received(row["message"]), Limits()) == ([{"id": "kp:trace:1"}], {})


@pytest.mark.parametrize("row", SENT)
def test_a_result_is_stored_for_a_producer_that_may_wait_for_it(row: dict[str, Any]) -> None:
    message = received(row["message"])
    # Celery 4.4 does not send ``ignore_result``, and Celery's first protocol has no place for it.
    is_wanted = row["case"] in ("default", "asked") and not row["celery"].startswith("4.")
    assert bool(result_id(message)) == is_wanted
    assert bool(result_id(SimpleNamespace(headers=anew(message).headers))) == is_wanted
