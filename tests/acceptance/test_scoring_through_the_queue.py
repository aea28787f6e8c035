"""A trace goes onto a queue, a worker in its own process scores it, a decision comes out."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import pytest
import redis
from celery import Celery
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.ledger import Store
from kp_scorer.ledger.dead_letters import DeadLetter
from kp_scorer.offline import offline_decider
from kp_scorer.settings import Settings

from tests.support.builders import minimal_payload, step
from tests.support.outcomes import place_in_log
from tests.support.processes import Worker, wait_until
from tests.support.traces import fresh_samples, new_id

SECRET = "the patient is called Xylophonia"


@pytest.fixture
def foreign(shared_settings: Settings) -> Iterator[Celery]:
    """A Celery app that knows nothing of ours but the URL and the names."""
    app = Celery("foreign", broker=shared_settings.broker.url, backend=shared_settings.broker.url, set_as_current=False)
    yield app
    app.close()


def test_samples_get_the_scores_that_an_offline_scorer_gives_in_the_logs_order(
    client: Client, shared_settings: Settings, shared_store: Store
) -> None:
    # Whatever other tests had scored before would be compared with.
    for log in shared_store.novelty_logs():
        log.clear()
    payloads = {str(trace["id"]): trace for trace in fresh_samples(48)}
    for payload in payloads.values():
        client.submit(payload)
    decisions = [status.decision for status in client.as_completed(payloads, timeout_s=60) if status.decision]
    assert len(decisions) == 48
    offline = offline_decider(shared_settings)
    for decision in sorted(decisions, key=place_in_log):
        (again,) = offline.decide([decode_trace(payloads[decision.trace_id], Limits())])
        assert isinstance(again, Decision)
        # In half precision sums depend on what else is in the batch.
        assert again.score == pytest.approx(decision.score, abs=0.001)
        assert again.outcome == decision.outcome


@pytest.mark.usefixtures("shared_worker")
def test_any_celery_app_can_call_the_task_by_name_and_ask_for_the_result(foreign: Celery) -> None:
    # What looks like a type of kombu's is the content of a trace all the same.
    kinds = [{"input_schema": {"__type__": kind, "__value__": "one"}} for kind in ("uuid", "unheard of")]
    first, second = (trace | {"task": trace["task"] | kind} for trace, kind in zip(fresh_samples(2), kinds, strict=True))
    call = partial(foreign.send_task, "score_trace", queue="traces", ignore_result=False)
    decisions = [Decision.model_validate(call(args=[trace]).get(timeout=60)) for trace in (first, second)]
    assert [decision.trace_id for decision in decisions] == [first["id"], second["id"]]
    assert Decision.model_validate(call(kwargs={"trace": first}).get(timeout=60)) == decisions[0]
    detail = "$: expected at most 1048576 bytes"
    dead = {"trace_id": "", "state": "dead", "reason": "invalid", "detail": detail}
    assert call(args=["x" * 2_000_000]).get(timeout=30) == dead


@pytest.mark.usefixtures("shared_worker")
def test_a_result_is_stored_only_if_asked_for_and_under_an_id_that_nobody_guesses(
    foreign: Celery, client: Client, shared_redis: redis.Redis
) -> None:
    first, second = fresh_samples(2)
    unasked = foreign.send_task("score_trace", args=[first], queue="traces", ignore_result=True)
    foreign.send_task("score_trace", args=[second], queue="traces", ignore_result=False, task_id="order-17")
    assert [client.wait(trace["id"], timeout_s=60).trace_id for trace in (first, second)]
    wait_until(lambda: not (shared_redis.llen("traces") or shared_redis.hlen("traces.in_hand")))
    assert not shared_redis.exists("celery-task-meta-order-17", f"celery-task-meta-{unasked.id}")


def deep(levels: int) -> dict[str, Any]:
    return {"deeper": deep(levels - 1) if levels else SECRET}


INVALID: Final[dict[str, list[Any]]] = {
    "only argument": [{}, {}],
    "task.objective": [minimal_payload() | {"task": {"objective": 7, "input_schema": SECRET}}],
    "at most 1048576 bytes": [minimal_payload(objective="x" * 10_000_000)],
    "steps.0.input": [minimal_payload(steps=[step("thought", input=deep(100))])],
}
"""Arguments that are no valid submission, by a part of what is said of them."""

MALFORMED: Final = {
    SECRET: ("score_trace", "body: not JSON: Expecting value at line 1 column 1"),
    "[" * 20_000: ("score_trace", "expected JSON"),
    "[" * 100_000: (None, "expected score_trace"),
    '[[], "kwargs", {}]': ("score_trace", "expected a list and an object"),
    f'[["{SECRET}"], {{}}, {{}}]': ("other_task", "expected score_trace"),
    f'{{"{SECRET}": 1, "args": []}}': (None, "expected score_trace"),
}
"""Bodies that are no submission, with the task that their message names, and a part of what is said of them."""


def test_what_is_no_valid_submission_becomes_a_dead_letter_with_its_reason_and_bytes(
    shared_worker: Worker, foreign: Celery, shared_store: Store
) -> None:
    before = {letter.letter_id for letter in shared_store.dead_letters.read()}
    for args in INVALID.values():
        foreign.send_task("score_trace", args=args, queue="traces")
    with foreign.producer_pool.acquire() as producer:
        publish = partial(producer.publish, routing_key="traces", content_type="application/json", content_encoding="utf-8")
        for body, (task, _) in MALFORMED.items():
            publish(body, headers={"task": task, "id": new_id(), "argsrepr": SECRET} if task else {})

    def dead_letters() -> list[DeadLetter]:
        return [letter for letter in shared_store.dead_letters.read() if letter.letter_id not in before]

    wait_until(lambda: len(dead_letters()) == len(INVALID) + len(MALFORMED))
    payloads = {shared_store.dead_letters.payload(letter.letter_id): letter for letter in dead_letters()}
    for body, (_, detail) in MALFORMED.items():
        letter = payloads.pop(body.encode())
        assert (letter.reason, detail in letter.detail) == ("malformed", True), letter.detail
    assert {letter.reason for letter in payloads.values()} == {"invalid"}
    for detail, args in INVALID.items():
        (payload,) = (payload for payload, letter in payloads.items() if detail in letter.detail)
        content = json.loads(payload)
        # What was parsed of a call is its argument.
        assert args == (content[0] if isinstance(content, list) else [content])
    assert SECRET not in shared_worker.text()
    assert shared_worker.process.poll() is None


def test_a_conflict_that_reaches_the_worker_is_dead_lettered_and_the_first_decision_stands(
    client: Client, foreign: Celery, shared_store: Store
) -> None:
    original, conflicting = fresh_samples(2)
    first = client.wait(client.submit(original), timeout_s=60)
    foreign.send_task("score_trace", args=[conflicting | {"id": original["id"]}], queue="traces")
    (letter,) = wait_until(lambda: [each for each in shared_store.dead_letters.read() if each.trace_id == original["id"]])
    assert letter.reason == "conflict"
    assert client.wait(original["id"], timeout_s=1) == first


def test_one_log_line_a_decision_and_no_content_in_any(shared_worker: Worker, client: Client) -> None:
    (payload,) = fresh_samples(1)
    payload["steps"] = [*payload["steps"], {"step_id": 99, "type": "thought", "content": SECRET}]
    decision = client.wait(client.submit(payload), timeout_s=60)
    decided = shared_worker.events
    (line,) = wait_until(lambda: [each for each in decided("trace_decided") if each["trace_id"] == payload["id"]])
    assert (line["domain"], line["outcome"]) == (payload["metadata"]["task_domain"], decision.outcome)
    assert line["score"] == pytest.approx(decision.score, abs=1e-6)
    assert line["duration_ms"] > 0
    assert SECRET not in shared_worker.text()
