"""A trace goes onto a queue, a worker in its own process scores it, a decision comes out."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import open_results
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.ledger import Store
from kp_scorer.offline import offline_decider
from kp_scorer.settings import Settings

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
    for decision in sorted(decisions, key=_place):
        (again,) = offline.decide([decode_trace(payloads[decision.trace_id], Limits())])
        assert isinstance(again, Decision)
        # In half precision sums depend on what else is in the batch.
        assert again.score == pytest.approx(decision.score, abs=0.001)
        assert again.outcome == decision.outcome


def test_a_decision_is_published_to_the_queue_of_its_outcome(client: Client, shared_settings: Settings) -> None:
    payloads = fresh_samples(6)
    waiting = {client.submit(payload) for payload in payloads}
    decided = {status.trace_id: status.decision for status in client.as_completed(waiting, timeout_s=60)}
    received: dict[str, dict[str, Any]] = {}

    def all_received() -> bool:
        for outcome in ("accepted", "rejected"):
            with open_results(make_celery(shared_settings), shared_settings, outcome) as results:
                for item in results.receive():
                    item.acknowledge()
                    assert item.decision["outcome"] == outcome
                    received[item.decision["trace_id"]] = item.decision
        return waiting <= received.keys()

    assert wait_until(all_received)
    for trace_id in waiting:
        assert Decision.model_validate(received[trace_id]) == decided[trace_id]


def test_the_same_trace_again_keeps_its_decision_and_the_same_content_under_another_id_is_a_duplicate(
    client: Client,
) -> None:
    (payload,) = fresh_samples(1)
    first = client.wait(client.submit(payload), timeout_s=60)
    assert client.wait(client.submit(payload), timeout_s=60) == first
    copy = client.wait(client.submit(payload | {"id": new_id()}), timeout_s=60)
    assert copy.dimensions.novelty == 0.0
    assert copy.novelty.duplicate_of


@pytest.mark.parametrize("kind", ["uuid", "unheard of"])
def test_free_form_values_may_look_like_types_of_kombu(client: Client, kind: str) -> None:
    (payload,) = fresh_samples(1)
    payload["task"]["input_schema"] = {"__type__": kind, "__value__": "one"}
    decision = client.wait(client.submit(payload), timeout_s=30)
    assert decision.trace_id == payload["id"]


@pytest.mark.usefixtures("shared_worker")
def test_any_celery_app_can_call_the_task_by_name_and_ask_for_the_result(foreign: Celery) -> None:
    (payload,) = fresh_samples(1)
    result = foreign.send_task("score_trace", args=[payload], queue="traces", ignore_result=False)
    decision = Decision.model_validate(result.get(timeout=60))
    assert decision.trace_id == payload["id"]
    again = foreign.send_task("score_trace", kwargs={"trace": payload}, queue="traces", ignore_result=False)
    assert Decision.model_validate(again.get(timeout=60)) == decision


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


@pytest.mark.usefixtures("shared_worker")
def test_the_result_of_an_unparsed_message_is_its_error(foreign: Celery) -> None:
    result = foreign.send_task("score_trace", args=["x" * 2_000_000], queue="traces", ignore_result=False)
    detail = "$: expected at most 1048576 bytes"
    assert result.get(timeout=30) == {"trace_id": "", "state": "dead", "reason": "invalid", "detail": detail}


@pytest.mark.parametrize(
    ("case", "args", "detail"),
    [
        ("two arguments", [{}, {}], "only argument"),
        ("a number where text belongs", "objective", "task.objective"),
        ("a 10 MB trace", "huge", "at most 1048576 bytes"),
        ("a deep trace", "deep", "steps.0.input"),
    ],
)
def test_a_malformed_submission_becomes_a_dead_letter_with_its_reason_and_bytes(
    shared_worker: Worker, shared_settings: Settings, foreign: Celery, shared_store: Store, case: str, args: Any, detail: str
) -> None:
    (payload,) = fresh_samples(1)
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"deeper": deep}
    malformed = {
        "objective": payload | {"task": {"objective": 7, "input_schema": SECRET}},
        "huge": payload | {"task": {"objective": "x" * 10_000_000}},
        "deep": payload | {"steps": [{"step_id": 0, "type": "thought", "input": {SECRET: deep}}]},
    }
    sent = [malformed[args]] if isinstance(args, str) else args
    before = len(_dead_letters(shared_store))
    foreign.send_task("score_trace", args=sent, queue="traces")
    dead_letters = wait_until(lambda: _dead_letters(shared_store)[before:])
    assert dead_letters[0]["reason"] == "invalid"
    assert detail in dead_letters[0]["detail"]
    assert len(dead_letters[0]["payload"]) > 10_000_000 or case != "a 10 MB trace"
    assert SECRET not in shared_worker.text()
    assert shared_worker.process.poll() is None


@pytest.mark.parametrize(
    ("task", "body", "detail"),
    [
        ("score_trace", SECRET, "body: not JSON: Expecting value at line 1 column 1"),
        ("score_trace", "[" * 20_000, "expected JSON"),
        (None, "[" * 100_000, "expected score_trace"),
        ("score_trace", '[[], "kwargs", {}]', "expected a list and an object"),
        ("other_task", f'[["{SECRET}"], {{}}, {{}}]', "expected score_trace"),
        (None, f'{{"{SECRET}": 1, "args": []}}', "expected score_trace"),
    ],
)
def test_a_message_that_is_no_submission_becomes_a_dead_letter_with_its_bytes(
    shared_worker: Worker,
    shared_settings: Settings,
    foreign: Celery,
    shared_store: Store,
    task: str | None,
    body: str,
    detail: str,
) -> None:
    before = len(_dead_letters(shared_store))
    headers = {"task": task, "id": new_id(), "argsrepr": SECRET} if task else {}
    with foreign.producer_pool.acquire() as producer:
        producer.publish(
            body,
            routing_key="traces",
            headers=headers,
            content_type="application/json",
            content_encoding="utf-8",
        )
    (dead_letter,) = wait_until(lambda: _dead_letters(shared_store)[before:])
    assert dead_letter["reason"] == "malformed"
    assert detail in dead_letter["detail"]
    assert dead_letter["payload"] == body
    assert SECRET not in shared_worker.text()
    assert shared_worker.process.poll() is None


def test_a_conflict_that_reaches_the_worker_is_dead_lettered_and_the_first_decision_stands(
    client: Client, foreign: Celery, shared_store: Store, shared_settings: Settings
) -> None:
    original, conflicting = fresh_samples(2)
    first = client.wait(client.submit(original), timeout_s=60)
    foreign.send_task("score_trace", args=[conflicting | {"id": original["id"]}], queue="traces")

    def conflicts() -> list[dict[str, str]]:
        return [dead_letter for dead_letter in _dead_letters(shared_store) if dead_letter["trace_id"] == original["id"]]

    assert wait_until(conflicts)[0]["reason"] == "conflict"
    assert client.wait(original["id"], timeout_s=1) == first


def test_one_log_line_a_decision_and_no_content_in_any(shared_worker: Worker, client: Client) -> None:
    (payload,) = fresh_samples(1)
    payload["steps"] = [*payload["steps"], {"step_id": 99, "type": "thought", "content": SECRET}]
    decision = client.wait(client.submit(payload), timeout_s=60)

    def lines() -> list[dict[str, Any]]:
        return [event for event in shared_worker.events("trace_decided") if event["trace_id"] == payload["id"]]

    (line,) = wait_until(lines)
    assert line["domain"] == payload["metadata"]["task_domain"]
    assert line["outcome"] == decision.outcome
    assert line["score"] == pytest.approx(decision.score, abs=1e-6)
    assert line["duration_ms"] > 0
    assert SECRET not in shared_worker.text()


def _place(decision: Decision) -> int:
    assert decision.novelty.entry
    return int(decision.novelty.entry.partition("-")[2])


def _dead_letters(store: Store) -> list[dict[str, str]]:
    return [
        {
            "reason": dead_letter.reason,
            "detail": dead_letter.detail,
            "trace_id": dead_letter.trace_id,
            "payload": store.dead_letters.payload(dead_letter.letter_id).decode(),
        }
        for dead_letter in store.dead_letters.read()
    ]
