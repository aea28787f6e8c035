"""Whatever lies on a results queue, and however slowly it is read on: `decisions --follow` holds bounded memory."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from typing import Any

import psutil
import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import declare_queues, with_producer
from kp_scorer.broker.queues import results_queue
from kp_scorer.settings import as_environment

from tests.hostile.conftest import ShippedArena
from tests.support.attacks import GZIP, bombs
from tests.support.builders import decision_on
from tests.support.commands import COMMAND
from tests.support.processes import wait_until

RESIDENT_BYTES = 300_000_000
PIPE_BYTES = 65_536
MIB = 2**20
LARGE = decision_on("kp:trace:large")[:-1] + b',"more":"%s"}' % (b"x" * MIB)
OVERSIZED = decision_on("kp:trace:oversized")[:-1] + b',"more":"%s"}' % (b"x" * 20 * MIB)


def unread_bytes(pipe: Any) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.slow
def test_decisions_hold_bounded_memory_while_nobody_reads_what_they_print(shipped_arena: ShippedArena) -> None:
    settings = shipped_arena.settings_of("worker")
    queue = results_queue(settings, "accepted")
    headers = {"compression": GZIP}
    bodies = [(bombs()[GZIP], headers), (OVERSIZED, {}), *[(LARGE, {})] * 40, (decision_on("kp:trace:last"), {})]
    with make_celery(settings) as app:
        declare_queues(app, [queue])
        for body, extra in bodies:
            message = {"body": body, "routing_key": queue.name, "content_type": "application/json", "headers": extra}
            with_producer(app, "test", lambda producer, message=message: producer.publish(exchange="", **message))  # type: ignore[misc]
    command = [*COMMAND, "decisions", "--follow"]
    environment = os.environ | as_environment(shipped_arena.settings_of("operator"))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as follow:
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
