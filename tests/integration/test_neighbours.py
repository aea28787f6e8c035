"""Workers cope with neighbours that take our keys in Redis or leave Celery's variables in the environment."""

from pathlib import Path
from typing import Any

import pytest
import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import SubmissionCounts

from tests.support.changed_settings import with_changed
from tests.support.processes import KP_SCORER_WORKER, PATIENCE_S, at_work, wait_until
from tests.support.traces import fresh_samples, short_traces


def test_work_resumes_once_a_neighbour_frees_our_key(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    # Messages that have been moved and not noted come back after this time, as if their worker had died.
    settings = with_changed(settings, broker__visibility_timeout_s=3)
    queue = settings.queues.first
    names = [f"{queue}.unacknowledged", f"{queue}.renewed", keys.pending, keys.counts, keys.tallies, keys.dead_letter_sizes]
    traces = short_traces(len(names), seed=20)
    with (
        make_celery(settings) as foreign,
        at_work(settings, tmp_path) as (worker, client),
    ):
        for number, (name, trace) in enumerate(zip(names, traces, strict=True)):
            # Each exchange of keys is one transaction, because the worker keeps working meanwhile.
            with redis_client.pipeline(transaction=True) as transaction:
                transaction.dump(name)
                transaction.set(name, "a neighbour's")
                dumped, _ = transaction.execute()
            foreign.send_task(TASK_NAME, args=[trace], queue=queue, ignore_result=True)
            redis_client.lpush(queue, f"no message {number}")
            wait_until(lambda name=name: f"WRONGTYPE {name}" in worker.text())  # type: ignore[misc]
            if dumped:
                redis_client.restore(name, 0, dumped, replace=True)
            else:
                redis_client.delete(name)
            assert client.wait(trace["id"], timeout_s=PATIENCE_S)
            wait_until(lambda number=number: len(list(store.dead_letters.read())) == number + 1)  # type: ignore[misc]
            counts = store.ledger.counts()
            assert (counts.submitted, counts.pending) == (counts.decided + counts.dead, 0), name
            assert counts.submitted == 2 * (number + 1), name


def test_messages_in_flight_while_a_neighbour_has_our_key_are_not_lost(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    settings = with_changed(settings, ledger__resend_after_s=3)
    (trace,) = short_traces(1, seed=21)

    def empty_since_ms() -> int:
        value: Any = redis_client.get(keys.drained)
        return int(value or 0)

    with at_work(settings, tmp_path, variables={"CONSTANTS": "LedgerSettings.max_resends=0"}) as (worker, client):
        # With a neighbour's key in place of the log, a trace can be begun, but neither placed nor decided.
        client.wait(client.submit(short_traces(1, seed=22)[0]), timeout_s=PATIENCE_S)
        (log,) = redis_client.keys("*log:word-hash-1")
        with redis_client.pipeline(transaction=True) as transaction:
            transaction.rename(log, "kept")
            transaction.set(log, "a neighbour's")
            transaction.execute()
        client.submit(trace)
        wait_until(lambda: worker.events("trace_waits"))
        # By this time, a message that is nowhere would have counted as lost twice over.
        due_ms = wait_until(empty_since_ms) + 7_000
        wait_until(lambda: empty_since_ms() > due_ms)
        assert list(store.dead_letters.read()) == []
        redis_client.rename("kept", log)
        assert client.wait(trace["id"], timeout_s=PATIENCE_S)
    assert store.ledger.counts() == SubmissionCounts(submitted=2, pending=0, decided=2, dead=0)


CELERY = ("celery", "-A", "kp_scorer.app", "worker")
NOWHERE = "redis://:not-ours@127.0.0.1:1/0"
STRAY = {
    "CELERY_BROKER_URL": NOWHERE,
    "CELERY_BROKER_READ_URL": NOWHERE,
    "CELERY_BROKER_WRITE_URL": NOWHERE,
    "CELERY_RESULT_BACKEND": NOWHERE,
    "CELERY_CONFIG_MODULE": "no.such.module",
    "CELERY_LOADER": "no.such:Loader",
}
"""Variables that would affect another Celery app."""

OF_THE_COMMAND = {"BROKER_URL": NOWHERE, "RESULT_BACKEND": NOWHERE, "CONFIG_MODULE": "no.such.module", "APP": "no.such.app"}
"""Variables that the command ``celery`` reads."""


def test_a_worker_and_its_clients_connect_where_our_settings_say(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in STRAY.items():
        monkeypatch.setenv(name, value)
    unscored = with_changed(settings, embedding__embedder="none")
    with (
        at_work(unscored, tmp_path, command=KP_SCORER_WORKER, variables=OF_THE_COMMAND) as (worker, client),
        make_celery(settings) as app,
    ):
        (asked, submitted) = fresh_samples(2)
        assert client.wait(client.submit(submitted), timeout_s=PATIENCE_S).trace_id == submitted["id"]
        # A producer that asks for a result finds it where the worker stores results.
        result = app.send_task("score_trace", args=[asked], ignore_result=False)
        assert result.get(timeout=PATIENCE_S)["trace_id"] == asked["id"]
    (warning,) = worker.events("celery_variables_ignored")
    assert set(warning["variables"]) == STRAY.keys()
    assert "not-ours" not in worker.text()


def test_celerys_command_runs_the_worker_and_takes_no_options_from_variables(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    unscored = with_changed(settings, embedding__embedder="none")
    (trace,) = fresh_samples(1)
    variables = {"CELERY_WORKER_PURGE": "1", "CELERY_WORKER_QUEUES": "other", "CELERY_WORKER_POOL": "prefork"}
    with Client(settings) as client:
        client.submit(trace)
        with at_work(unscored, tmp_path, command=CELERY, variables=variables) as (worker, _):
            assert client.wait(trace["id"], timeout_s=PATIENCE_S).novelty.source == "no_embedder"
            # The name differs from those of other workers on this machine.
            (report,) = wait_until(store.worker_reports)
            assert report.node.partition("@")[0] == f"scorer-{worker.process.pid}"
    (warning,) = worker.events("celery_variables_ignored")
    assert set(warning["variables"]) == variables.keys()
