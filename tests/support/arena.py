"""Where a disaster takes place: a store and a broker that can be broken, and what the tests do on them over and over."""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal, Self

from kombu import Connection
from kombu.exceptions import OperationalError
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings, load_settings

from tests.support.checker import check
from tests.support.fleet import Fleet, Variables
from tests.support.processes import CRASHING_WORKER, wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import in_hand
from tests.support.servers import RedisServer
from tests.support.traces import short_traces

BrokerName = Literal["redis", "rabbitmq"]

SEED: Final = int(os.environ.get("CHAOS_SEED", "20261121"))
TRACES: Final = int(os.environ.get("CHAOS_TRACES", "500"))
"""How many traces a case has; a longer form of all cases takes as many more."""

SETTLE_S: Final = 60.0 + TRACES / 20

IMPATIENT: Final[Mapping[str, Any]] = {
    "broker.visibility_timeout_s": 3,
    "broker.timeout_s": 1.0,
    "redis.timeout_s": 1.0,
    "ledger.resend_after_s": 3.0,
    # Small, so that some hundreds of traces are many batches and disasters find workers at every step.
    "worker.batch_size": 8,
    "worker.concurrency": 32,
}
"""Settings by which little time passes until a loss is noticed."""


class Arena:
    """A store and a broker of one test's own, each behind a proxy. With Redis as the broker, both are one."""

    def __init__(self, broker: BrokerName, broker_url: str, directory: Path, queues: Mapping[str, str]) -> None:
        """Prepare; the servers start when the context is entered. ``broker_url`` is empty for Redis."""
        self.broker = broker
        self.directory = directory
        self.redis = RedisServer(directory)
        self.store_proxy = Proxy(self.redis.url)
        self.broker_proxy = Proxy(broker_url) if broker_url else self.store_proxy
        self._broker_url = broker_url or self.redis.url
        self._queues = queues
        self._open = ExitStack()

    def settings(self, **changed: object) -> Settings:
        """Settings of who must not notice a bad network; ``worker__batch_size=1`` changes one."""
        urls = {"broker.url": self._broker_url, "redis.url": self.redis.url}
        named = {name.replace("__", "."): value for name, value in changed.items()}
        return load_settings({**urls, **self._queues, **IMPATIENT, **named})

    def settings_behind_proxies(self, **changed: object) -> Settings:
        """The same, by way of the proxies."""
        return self.settings(broker__url=self.broker_proxy.url, redis__url=self.store_proxy.url, **changed)

    def waiting(self) -> int:
        """How many messages wait on the queue of traces; none that is in hand counts."""
        queue = self.settings().queues.traces
        if self.broker == "redis":
            with self.redis.connect() as client:
                return int(client.llen(queue))
        with Connection(self._broker_url) as connection, connection.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).message_count)

    def is_idle(self) -> bool:
        """Whether no message waits and none is in hand."""
        if self.waiting():
            return False
        queue = self.settings().queues.traces
        if self.broker == "rabbitmq":
            # What was given back in between waits again.
            return not (in_hand(self._broker_url, queue) or self.waiting())
        with self.redis.connect() as client:
            return not any((client.llen(f"{queue}.taking"), client.hlen(f"{queue}.in_hand")))

    def finish(self, fleet: Fleet, submitted: Collection[str], dead: Collection[str] = (), **expected: Any) -> None:
        """Wait for the end of every trace, stop the workers in good order, and check what they left."""
        settle(fleet.settings, submitted)
        self._wait_until_quiet(fleet)
        # One that only just starts would die of the signal.
        fleet.wait_until_ready()
        codes = fleet.stop()
        assert set(codes) == {0}, f"exit codes {codes}\n{fleet[0].text()[-2_000:]}"
        assert self.is_idle(), "a worker that ended had messages left to give back"
        check(fleet.settings, submitted, dead, **expected)

    def _wait_until_quiet(self, fleet: Fleet) -> None:
        """Wait until no message waits or is in hand; what is in hand RabbitMQ does not tell, so a second must pass."""
        quiet_s = 0.0 if self.broker == "redis" else 1.0
        decided, since = 0, time.monotonic()

        def is_quiet() -> bool:
            nonlocal decided, since
            before, decided = decided, fleet.logged("trace_decided")
            if decided != before or not self.is_idle():
                since = time.monotonic()
                return False
            return time.monotonic() - since >= quiet_s

        wait_until(is_quiet, SETTLE_S)

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


def supervised(settings: Settings, directory: Path, count: int, variables: Variables = lambda place, life: {}) -> Fleet:
    """Workers that die, err and stall where a test wants them to, each replaced when it ends."""
    return Fleet(settings, directory, count, CRASHING_WORKER, variables, supervised=True)


def traces(count: int = TRACES, *words: str) -> list[dict[str, Any]]:
    """Short traces, with words of trouble in their objectives."""
    made = short_traces(count, SEED)
    for trace in made:
        trace["task"] = {"objective": " ".join([trace["task"]["objective"], *words])}
    return made


def submit(client: Client, payloads: Sequence[Mapping[str, Any]], patience_s: float = 30.0) -> list[str]:
    """Submit all; try again what was refused, as a submitter must. Return the ids."""

    def taken(payload: Mapping[str, Any]) -> bool:
        try:
            client.submit(payload)
        except ServiceUnavailable:
            return False
        return True

    for payload in payloads:
        wait_until(lambda payload=payload: taken(payload), patience_s)  # type: ignore[misc]
    return [str(payload["id"]) for payload in payloads]


def settle(settings: Settings, trace_ids: Collection[str]) -> None:
    """Wait until every trace is decided or dead; say which are not if some never are."""
    pending = set(trace_ids)

    def all_settled() -> bool:
        try:
            pending.difference_update(status.trace_id for status in client.as_settled(sorted(pending), timeout_s=0.5))
        except (ServiceUnavailable, OperationalError):
            return False
        return not pending

    with Client(settings) as client:
        try:
            wait_until(all_settled, SETTLE_S)
        except AssertionError:
            states = [status and status.state for status in client.look_up(sorted(pending))]
            raise AssertionError(
                f"{len(pending)} never settled: {list(zip(sorted(pending), states, strict=True))[:5]}"
            ) from None


def decided_of(client: Client, trace_ids: Sequence[str]) -> set[str]:
    """Those that are decided now."""
    return {status.trace_id for status in client.look_up(trace_ids) if status and status.decision}


def slowly(place: int, life: int) -> dict[str, str]:
    """Variables of workers whose batches take so long that a load lasts for seconds."""
    return {"EMBED_S": "0.2"}
