"""What is no id does not get into the store by a message either."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.settings import Settings
from kp_scorer.store import DeadLetter, Store

from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.traces import fresh_samples

NO_IDS: Final = (
    "kp:trace:é",
    "kp:trace:a b",
    "kp:trace:a\n",
    "kp:trace:\x1b[2J",
    "kp:trace:\0",
    "kp:trace:" + "x" * 192,
    "x",
    "",
)


@pytest.fixture
def letters(settings: Settings, store: Store, tmp_path: Path) -> dict[str, DeadLetter]:
    """The dead letters that a worker made of messages with these ids, by the id in them."""
    (trace,) = fresh_samples(1)
    with make_celery(settings) as app, start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER):
        for wrong in NO_IDS:
            app.send_task("score_trace", args=[trace | {"id": wrong}], task_id=wrong or None)
        wait_until(lambda: store.ledger.counts().dead == len(NO_IDS))

    def id_in(letter: DeadLetter) -> Any:
        return json.loads(store.dead_letters.payload(letter.letter_id))["id"]

    return {id_in(letter): letter for letter in store.dead_letters.read()}


def test_a_message_with_no_id_of_a_trace_is_a_letter_that_names_none(letters: dict[str, DeadLetter]) -> None:
    assert letters.keys() == set(NO_IDS)
    for letter in letters.values():
        assert (letter.reason, letter.trace_id) == ("invalid", "")
        assert letter.detail.startswith("id: ")
