"""Celery's messages are read as its versions sent them through kombu's transport in memory."""

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
"""Calls of ``send_task`` by Celery 4.4 to 5.7: without ``ignore_result``, with each value of it, and by the first protocol."""

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
    # Celery 4.4 does not say, and its first protocol cannot.
    is_wanted = row["case"] in ("default", "asked") and not row["celery"].startswith("4.")
    assert bool(result_id(message)) == is_wanted
    assert bool(result_id(SimpleNamespace(headers=anew(message).headers))) == is_wanted
