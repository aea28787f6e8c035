"""A trace goes onto a queue, a worker with the model scores it, and a decision comes out."""

from collections.abc import Iterator
from functools import partial

import psutil
import pytest
from celery import Celery
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.settings import Settings

from tests.support.changed_settings import settings_at
from tests.support.processes import KP_SCORER_WORKER, PATIENCE_S, Worker, at_work, wait_until
from tests.support.traces import fresh_samples


@pytest.fixture(scope="module")
def working_settings(redis_url: str) -> Settings:
    """Settings of the running worker; its database is never emptied, so tests use ids of their own."""
    return settings_at(redis_url.removesuffix("/0") + "/1")


@pytest.fixture(scope="module")
def working(working_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Client]]:
    with at_work(working_settings, tmp_path_factory.mktemp("working"), command=KP_SCORER_WORKER) as (worker, client):
        yield worker, client


@pytest.fixture
def client(working: tuple[Worker, Client]) -> Client:
    worker, opened = working
    assert worker.process.poll() is None, worker.text()
    return opened


@pytest.fixture
def foreign(working_settings: Settings) -> Iterator[Celery]:
    """Someone else's Celery app, which knows only our URL and names."""
    url = working_settings.broker.url
    with Celery("foreign", broker=url, backend=url, set_as_current=False) as app:
        yield app


def test_a_ready_worker_holds_no_torch_and_little_memory(working: tuple[Worker, Client]) -> None:
    worker, _ = working
    process = psutil.Process(worker.process.pid)
    (loaded,) = worker.logged("embedder_loaded")
    assert loaded["engine"].startswith("openvino")
    # The worker has not loaded the span exporter (google/_upb) either, because no variable names a collector.
    mapped = [each.path for each in process.memory_maps()]
    assert [path for path in mapped if "torch" in path or "google/_upb" in path] == []
    # The weights take twice the memory if the processor has no bfloat16.
    assert process.memory_info().rss < (450e6 if "bf16" in loaded["engine"] else 600e6)
    # No checks are configured, so the worker has no process for them.
    assert process.children(recursive=True) == []


@pytest.mark.usefixtures("client")
def test_any_celery_app_can_call_the_task_by_name_and_ask_for_the_result(foreign: Celery) -> None:
    # Content that looks like kombu's encoding of a type is still content of the trace, and must not be decoded.
    kinds = [{"input_schema": {"__type__": kind, "__value__": "one"}} for kind in ("uuid", "unheard of")]
    first, second = (trace | {"task": trace["task"] | kind} for trace, kind in zip(fresh_samples(2), kinds, strict=True))
    call = partial(foreign.send_task, "score_trace", queue="traces", ignore_result=False)
    decisions = [Decision.model_validate(call(args=[trace]).get(timeout=60)) for trace in (first, second)]
    assert [decision.trace_id for decision in decisions] == [first["id"], second["id"]]
    assert Decision.model_validate(call(kwargs={"trace": first}).get(timeout=60)) == decisions[0]
    detail = "$: expected at most 1048576 bytes"
    dead = {"trace_id": "", "state": "dead", "reason": "invalid", "detail": detail}
    assert call(args=["x" * 2_000_000]).get(timeout=30) == dead


def test_a_result_is_stored_only_if_asked_for_and_under_an_id_that_nobody_guesses(foreign: Celery, client: Client) -> None:
    first, second = fresh_samples(2)
    unasked = foreign.send_task("score_trace", args=[first], queue="traces", ignore_result=True)
    foreign.send_task("score_trace", args=[second], queue="traces", ignore_result=False, task_id="order-17")
    assert [client.wait(trace["id"], timeout_s=PATIENCE_S).trace_id for trace in (first, second)]
    redis_client = foreign.backend.client
    wait_until(lambda: not (redis_client.llen("traces") or redis_client.hlen("traces.unacknowledged")))
    assert not redis_client.exists("celery-task-meta-order-17", f"celery-task-meta-{unasked.id}")
