"""Workers, readers and commands take bounded memory, whatever others send or store."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import redis
from click.testing import CliRunner
from kp_scorer.broker.calls import declare_queues, with_producer
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.queues import results_queue
from kp_scorer.broker.wire import arguments_in, largest_body_bytes, largest_message_bytes
from kp_scorer.cli.main import commands
from kp_scorer.errors import InvalidTrace
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment

from tests.hostile.conftest import ShippedArena
from tests.support.attacks import GZIP, Attack, bombs, open_queue
from tests.support.builders import decision_on, minimal_payload, step
from tests.support.calls import traced_memory
from tests.support.changed_settings import with_changed
from tests.support.commands import COMMAND
from tests.support.processes import PATIENCE_S, SMALL_WORKER, opened, start_worker, wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import LARGEST_BYTES
from tests.support.servers import redis_servers

MIB: Final = 2**20
IN_FLIGHT_BYTES: Final = 20_000_000
MESSAGES_BYTES: Final = 240_000_000
"""The size of all messages together, twelve times what may be in flight."""

OUTAGE_S: Final = 5.0
"""The length of the outage, in which a worker receives all the messages that it may."""

RESIDENT_BYTES: Final = 310 * MIB
"""A worker takes 140 to 265 MiB in these tests, including its copies of the largest message while it reads that. Without a
bound on the messages in flight it would take 320 to 400 MiB."""

READER_BYTES: Final = 300_000_000
PIPE_BYTES: Final = 65_536

WIDE: Final = "\U0001f600" + "x" * 16_000_000
"""A text whose first character makes Python store every character in four bytes."""


@pytest.mark.parametrize("shipped_redis", redis_servers()[:1], indirect=True)
@pytest.mark.parametrize(
    "item",
    [
        {"trace": WIDE},
        {"body": "1", "content-type": "application/json", "properties": {}, "headers": {"x": WIDE}},
        {"body": "1", "content-type": WIDE, "properties": {}, "headers": {}},
    ],
    ids=["in a plain message", "in a header", "in the content type"],
)
def test_a_message_holds_no_more_than_the_bytes_that_it_counts_by(
    settings: Settings, redis_client: redis.Redis, item: dict[str, object]
) -> None:
    redis_client.lpush(settings.queues.first, json.dumps(item, ensure_ascii=False).encode())
    with make_celery(settings) as app, app.connection_for_read() as connection, traced_memory() as memory:
        message = connection.default_channel.basic_get(settings.queues.first)
        with pytest.raises((InvalidTrace, ValueError)):
            arguments_in(message, settings.limits)
    assert memory.held_bytes < 1.1 * len(message.body) + MIB


@pytest.mark.slow
@pytest.mark.parametrize("shipped_arena", [*redis_servers()[:1], "rabbitmq"], indirect=True)
def test_messages_just_under_the_limit_take_bounded_memory_while_the_ledger_is_away(
    shipped_arena: ShippedArena, tmp_path: Path
) -> None:
    arena = shipped_arena
    limits = arena.settings().limits
    size_bytes = largest_message_bytes(limits) if arena.broker == "redis" else largest_body_bytes(limits)
    bodies = [b"%d" % number + b" " * (size_bytes - 10) for number in range(MESSAGES_BYTES // size_bytes)]
    changed = {"worker.concurrency": 96}
    limited = {"CONSTANTS": f"WorkerSettings.in_flight_bytes={IN_FLIGHT_BYTES}"}
    settings = arena.settings_of("worker", **changed, **{"broker.timeout_s": 10.0})
    log = tmp_path / "worker.log"
    with (
        Proxy(settings.redis.url) as proxy,
        start_worker(with_changed(settings, redis__url=proxy.url), log, command=SMALL_WORKER, variables=limited) as worker,
    ):
        proxy.refuse()
        with open_queue(arena) as put:
            for body in bodies:
                put(Attack("", body, {}, {"no envelope": True} if arena.broker == "redis" else {}))
        wait_until(lambda: worker.events("message_waits"))
        # No condition shows that the worker receives no more messages, so let some time pass.
        threading.Event().wait(OUTAGE_S)
        proxy.accept()
        # These are more dead letters than may be stored, so the oldest are dropped.
        wait_until(lambda: len(worker.events("trace_dead")) == len(bodies))
        assert worker.peak_bytes() < RESIDENT_BYTES


def with_trace(trace_id: str, size_bytes: int) -> bytes:
    return decision_on(trace_id)[:-1] + b',"trace":{"more":"%s"}}' % (b"x" * size_bytes)


LARGE = [with_trace(f"kp:trace:large-{number}", MIB) for number in range(40)]
OVERSIZED = with_trace("kp:trace:oversized", LARGEST_BYTES - MIB)


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
    with opened(*command, env=environment, stdout=subprocess.PIPE) as follow:
        assert follow.stdout
        process = psutil.Process(follow.pid)
        # A full pipe means that the command waits for its reader.
        wait_until(lambda: unread_bytes(follow.stdout) >= PIPE_BYTES)
        assert process.memory_info().rss < READER_BYTES
        lines = iter(follow.stdout.readline, b"")
        assert "kp:trace:last" in (json.loads(line)["trace_id"] for line in lines)
        assert process.memory_info().rss < READER_BYTES
        follow.send_signal(signal.SIGINT)
        assert follow.wait(PATIENCE_S) == 0


def test_explain_holds_only_the_traces_that_it_quotes(tmp_path: Path) -> None:
    decision, traces = tmp_path / "decision.json", tmp_path / "traces.jsonl"
    decision.write_bytes(decision_on("kp:trace:7"))
    steps = [step("thought", content="x" * 90_000)]
    with traces.open("w") as file:
        for number in range(500):
            file.write(json.dumps(minimal_payload(trace_id=f"kp:trace:{number}", steps=steps)) + "\n")
    with traced_memory() as memory:
        shown = CliRunner().invoke(commands, ["explain", str(decision), "--traces", str(traces)])
    assert "x" * 20 in shown.output
    assert memory.peak_bytes < 20 * MIB
