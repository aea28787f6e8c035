"""What lies on a results queue takes bounded memory of who reads it; what cannot be stored is a loss for its producer alone."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import declare_queues, with_producer
from kp_scorer.broker.queues import results_queue
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment

from tests.hostile.conftest import ShippedArena
from tests.support.attacks import GZIP, bombs
from tests.support.builders import decision_on
from tests.support.commands import COMMAND
from tests.support.processes import SMALL_WORKER, start_worker, wait_until
from tests.support.servers import redis_servers
from tests.support.traces import short_traces

RESIDENT_BYTES = 300_000_000
PIPE_BYTES = 65_536
MIB = 2**20


def with_trace(trace_id: str, size_bytes: int) -> bytes:
    return decision_on(trace_id)[:-1] + b',"trace":{"more":"%s"}}' % (b"x" * size_bytes)


LARGE = [with_trace(f"kp:trace:large-{number}", MIB) for number in range(40)]
OVERSIZED = with_trace("kp:trace:oversized", 20 * MIB)


def unread_bytes(pipe: Any) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.slow
@pytest.mark.parametrize("shipped_arena", [*redis_servers()[:1], "rabbitmq"], indirect=True)
def test_decisions_hold_bounded_memory_while_nobody_reads_what_they_print(shipped_arena: ShippedArena) -> None:
    settings = shipped_arena.settings_of("worker")
    queue = results_queue(settings, "accepted")
    headers = {"compression": GZIP}
    bodies = [(bombs()[GZIP], headers), (OVERSIZED, {}), *((body, {}) for body in LARGE), (decision_on("kp:trace:last"), {})]
    with make_celery(settings) as app:
        declare_queues(app, [queue])
        for body, extra in bodies:
            message = {"body": body, "routing_key": queue.name, "content_type": "application/json", "headers": extra}
            with_producer(app, "test", lambda producer, message=message: producer.publish(exchange="", **message))  # type: ignore[misc]
    command = [*COMMAND, "decisions", "--follow"]
    environment = os.environ | as_environment(shipped_arena.settings_of("operator"))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as follow, ExitStack() as leaving:
        leaving.callback(follow.kill)
        assert follow.stdout
        process = psutil.Process(follow.pid)
        # Until it waits for its reader.
        wait_until(lambda: unread_bytes(follow.stdout) >= PIPE_BYTES, timeout_s=60)
        assert process.memory_info().rss < RESIDENT_BYTES
        lines = iter(follow.stdout.readline, b"")
        assert "kp:trace:last" in (json.loads(line)["trace_id"] for line in lines)
        assert process.memory_info().rss < RESIDENT_BYTES
        follow.send_signal(signal.SIGINT)
        assert follow.wait(20) == 0


def test_a_result_that_cannot_be_stored_takes_no_other_with_it(
    settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    # As another Celery app may have left it, which pickles its results.
    spoilt, *others = (str(uuid.uuid4()) for _ in range(4))
    redis_client.set(f"celery-task-meta-{spoilt}", b"\x80\x04", ex=60)
    for task_id, trace in zip((spoilt, *others), short_traces(4, seed=61), strict=True):
        headers = {"task": "score_trace", "id": task_id, "ignore_result": False}
        envelope = {"body": json.dumps([[trace], {}, None]), "content-type": "application/json", "properties": {}}
        redis_client.lpush(settings.queues.traces, json.dumps(envelope | {"headers": headers}))
    # All of them are one batch, received by the worker as it starts.
    with start_worker(settings, tmp_path / "worker.log", command=SMALL_WORKER) as worker:
        wait_until(lambda: len(worker.events("trace_decided")) == 4 and worker.events("result_not_stored"))
        wait_until(lambda: all(redis_client.exists(f"celery-task-meta-{task_id}") for task_id in others), timeout_s=5)
