"""The arena of disasters: a store and a broker that tests can break, and the steps that most of these tests share."""

import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Literal, Self

import amqp
import redis
from kombu import Connection
from kombu.exceptions import OperationalError
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings, load_settings

from tests.support.fleet import Fleet, Variables
from tests.support.outcomes import check
from tests.support.processes import CRASHING_WORKER, PATIENCE_S, wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import confirming, unacknowledged
from tests.support.servers import RedisServer
from tests.support.traces import short_traces

BrokerName = Literal["redis", "rabbitmq"]

SEED: Final = int(os.environ.get("CHAOS_SEED", "20261121"))
TRACES: Final = int(os.environ.get("CHAOS_TRACES", "300"))
"""The number of traces in a case. Set it higher for a longer run of all cases."""

_LOOKED_UP_AT_ONCE: Final = 1_000
ENDED_WITHIN_S: Final = PATIENCE_S + TRACES / 20

IMPATIENT: Final[Mapping[str, Any]] = {
    "broker.visibility_timeout_s": 3,
    "broker.timeout_s": 1.0,
    "ledger.resend_after_s": 3.0,
    # This is so small that some hundreds of traces make many batches, and a disaster finds workers at every step.
    "worker.concurrency": 24,
}
"""Settings with which the workers notice a loss soon."""


class Arena:
    """A store and a broker that belong to one test, each behind a proxy. With Redis as the broker, both are one server."""

    def __init__(
        self, broker: BrokerName, broker_url: str, directory: Path, queues: Mapping[str, Any], store: RedisServer | None = None
    ) -> None:
        """Prepare the servers, which start when the context is entered. ``broker_url`` is empty for Redis."""
        self.broker = broker
        self.directory = directory
        self.redis = store or RedisServer(directory)
        self.store_proxy = Proxy(self.redis.url)
        self.broker_proxy = Proxy(broker_url) if broker_url else self.store_proxy
        self._broker_url = broker_url or self.redis.url
        self.producer_url = self._broker_url
        self._queues = queues
        self._open = ExitStack()

    def settings(self, **changed: object) -> Settings:
        """Return settings that bypass the proxies; ``worker__concurrency=1`` changes one."""
        urls = {"broker.url": self._broker_url, "redis.url": self.redis.url}
        named = {name.replace("__", "."): value for name, value in changed.items()}
        return load_settings({**urls, **self._queues, **IMPATIENT, **named})

    def settings_behind_proxies(self, **changed: object) -> Settings:
        return self.settings(broker__url=self.broker_proxy.url, redis__url=self.store_proxy.url, **changed)

    def waiting(self) -> int:
        """Return the number of messages that wait on the queues of traces; those in flight do not count."""
        queues = self.settings().queues.traces
        if self.broker == "redis":
            with self.redis.connect() as client:
                return sum(int(client.llen(queue)) for queue in queues)
        with Connection(self._broker_url) as connection, connection.channel() as channel:
            return sum(int(channel.queue_declare(queue, passive=True).message_count) for queue in queues)

    def is_idle(self) -> bool:
        queues = self.settings().queues.traces
        if self.broker == "rabbitmq":
            # A message that was requeued in the meantime waits again, and the second look finds it.
            in_flight = any(unacknowledged(self._broker_url, queue) for queue in queues)
            return not (self.waiting() or in_flight or self.waiting())
        with self.redis.connect() as client:
            return all(is_drained(client, queue) for queue in queues)

    def finish(self, fleet: Fleet, submitted: Collection[str], dead: Collection[str] = (), **expected: Any) -> None:
        """Wait until every trace has ended, stop the workers gracefully, and check the results."""
        wait_until_ended(fleet.settings, submitted)
        self._wait_until_quiet(fleet)
        # A worker that has only just started does not handle the signal yet, and would die of it.
        fleet.wait_until_ready()
        codes = fleet.stop()
        assert set(codes) == {0}, f"exit codes {codes}\n{fleet[0].text()[-2_000:]}"
        assert self.is_idle(), f"workers that ended gracefully left messages\n{fleet[0].text()[-2_000:]}"
        check(fleet.settings, submitted, dead, **expected)

    def _wait_until_quiet(self, fleet: Fleet) -> None:
        """Wait until no message has waited or been in flight for a while."""
        # A worker may be about to resend a trace that another has decided meanwhile, and RabbitMQ may be late to report a
        # message.
        quiet_s = 0.3 if self.broker == "redis" else 1.0
        decided, since = 0, time.monotonic()

        def is_quiet() -> bool:
            nonlocal decided, since
            before, decided = decided, fleet.logged("trace_decided")
            if decided != before or not self.is_idle():
                since = time.monotonic()
                return False
            return time.monotonic() - since >= quiet_s

        wait_until(is_quiet, ENDED_WITHIN_S)

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.enter_context(self.redis)
            opening.enter_context(self.store_proxy)
            if self.broker_proxy is not self.store_proxy:
                opening.enter_context(self.broker_proxy)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def put(settings: Settings, *bodies: bytes) -> None:
    """Put bytes on the queue of traces, as a client that knows nothing of Celery does: plain on Redis, as JSON on RabbitMQ."""
    queue = settings.queues.first
    if settings.broker.is_redis:
        with redis.Redis.from_url(settings.broker.url) as client:
            for body in bodies:
                client.lpush(queue, body)
        return
    with confirming(settings.broker.url) as connection:
        for body in bodies:
            message = amqp.Message(body, content_type="application/json", content_encoding="utf-8", delivery_mode=2)
            connection.default_channel.basic_publish(message, exchange=queue, routing_key=queue, mandatory=True)


def is_drained(client: redis.Redis, queue: str) -> bool:
    """Return whether no message is on a queue in Redis or in flight from it."""
    # One script counts all three, because a dead worker's message may return from those in flight to the queue between two
    # steps. A full Redis would refuse a transaction.
    count = "return redis.call('LLEN', KEYS[1]) + redis.call('LLEN', KEYS[2]) + redis.call('HLEN', KEYS[3])"
    return bool(client.eval(count, 3, queue, f"{queue}.moving", f"{queue}.unacknowledged") == 0)


def supervised(settings: Settings, directory: Path, count: int, variables: Variables = lambda place, life: {}) -> Fleet:
    return Fleet(settings, directory, count, CRASHING_WORKER, variables, supervised=True)


def traces(count: int = TRACES, *words: str) -> list[dict[str, Any]]:
    """Return short traces with these words, such as those that break a worker, in their objectives."""
    payloads = short_traces(count, SEED)
    for trace in payloads:
        trace["task"] = {"objective": " ".join([trace["task"]["objective"], *words])}
    return payloads


def submit(client: Client, payloads: Sequence[Mapping[str, Any]], patience_s: float = 30.0) -> list[str]:
    """Submit all traces, retrying those that are refused, as a producer must; return their ids."""

    def is_submitted(payload: Mapping[str, Any]) -> bool:
        try:
            client.submit(payload)
        except ServiceUnavailable:
            return False
        return True

    for payload in payloads:
        wait_until(lambda payload=payload: is_submitted(payload), patience_s)  # type: ignore[misc]
    return [str(payload["id"]) for payload in payloads]


def wait_until_ended(settings: Settings, trace_ids: Collection[str]) -> None:
    """Wait until every trace is decided or dead; fail with those that are not."""
    pending = set(trace_ids)

    def all_ended() -> bool:
        try:
            # Asking for all traces of a soak at once would take longer than a client waits.
            some = sorted(pending)[:_LOOKED_UP_AT_ONCE]
            pending.difference_update(status.trace_id for status in client.as_completed(some, timeout_s=0.5))
        except (ServiceUnavailable, OperationalError):
            return False
        return not pending

    with Client(settings) as client:
        try:
            wait_until(all_ended, ENDED_WITHIN_S)
        except AssertionError:
            some = sorted(pending)[:5]
            states = [status and status.state for status in client.look_up(some)]
            raise AssertionError(f"{len(pending)} never ended: {list(zip(some, states, strict=True))}") from None


def decided_of(client: Client, trace_ids: Sequence[str]) -> set[str]:
    return {status.trace_id for status in client.look_up(trace_ids) if status and status.decision}


def endure(seconds: float) -> None:
    """Let the disaster last this long. There is no condition to wait for."""
    threading.Event().wait(seconds)


def slowly(place: int, life: int) -> dict[str, str]:
    """Return variables that make batches so slow that a load lasts for seconds."""
    return {"EMBED_S": "0.2"}


@contextmanager
def in_mid_load(
    arena: Arena, load: Sequence[Mapping[str, Any]], workers: Settings, producer: Settings | None = None
) -> Iterator[tuple[Client, Fleet, list[str]]]:
    """Submit a load and run two workers; once they have begun to decide it, yield the client, the workers and the trace ids."""
    with Client(producer or arena.settings()) as client, supervised(workers, arena.directory, 2, slowly) as fleet:
        submitted = submit(client, load)
        fleet.wait_until_ready()
        wait_until(lambda: fleet.logged("trace_decided"))
        yield client, fleet, submitted
