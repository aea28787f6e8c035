"""A real RabbitMQ, with queues that belong to one test."""

import fcntl
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from amqp.exceptions import NotFound
from kombu import Connection
from kp_scorer.settings import Settings, load_settings

from tests.support.processes import wait_until

RABBITMQ_URL: Final = os.environ.get("TEST_RABBITMQ_URL", "amqp://guest:guest@localhost:5672//")
QUEUES: Final = ("traces", "intake", "accepted", "review", "rejected", "shadow", "dead")


_LOCK: Final = Path(tempfile.gettempdir()) / "kp-test-rabbitmq.lock"
_is_alone = False


@contextmanager
def rabbitmq_in_use(*, alone: bool = False) -> Iterator[None]:
    """Have the RabbitMQ on this machine stay as it is while the context lasts; or have it ``alone``, to change it.

    Tests in other processes wait meanwhile, so that none is run on what another has changed. A second context in the process
    that has it alone is a part of the first.
    """
    global _is_alone
    if _is_alone:
        yield
        return
    with _LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        _is_alone = alone
        try:
            yield
        finally:
            _is_alone = False


@contextmanager
def own_virtual_host(url: str) -> Iterator[str]:
    """Make a virtual host if this user may, and remove it in the end; else use the one that the URL names."""
    control = shutil.which("rabbitmqctl")
    with Connection(url) as connection:
        userid, local = connection.userid, connection.hostname in ("localhost", "127.0.0.1")
    name = f"kp-test-{uuid.uuid4().hex}"
    if not (control and local and _done(control, "add_vhost", name)):
        yield url
        return
    try:
        assert _done(control, "set_permissions", "--vhost", name, userid, ".*", ".*", ".*")
        yield f"{url.rpartition('@')[0]}@{url.rpartition('@')[2].partition('/')[0]}/{name}"
    finally:
        _done(control, "delete_vhost", name)


def confirming(url: str) -> Connection:
    """A connection on which each publish waits for its confirm.

    Without, RabbitMQ loses some of what was sent just before a channel is closed; ``tests.benchmarks.unconfirmed`` counts it.
    """
    return Connection(url, transport_options={"confirm_publish": True})


def evaluated(expression: str) -> str:
    """What the RabbitMQ on this machine answers to a piece of Erlang; empty where its rabbitmqctl may not be used."""
    control = shutil.which("rabbitmqctl")
    if not control:
        return ""
    done = subprocess.run([control, "eval", expression], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""


def in_hand(url: str, queue: str) -> int:
    """Messages of a quorum queue that were delivered and not acknowledged; 0 where that cannot be asked.

    Under CI it can be, and is asked until it is answered, as when the queue has a leader again.
    Neither the protocol tells, nor rabbitmqctl's list of queues, which is up to five seconds old: the queue's leader does.
    """
    with Connection(url) as connection:
        name = f'rabbit_misc:r(<<"{connection.virtual_host}">>, queue, <<"{queue}">>)'
    asked = "ra:leader_query(amqqueue:get_pid(Queue), fun rabbit_fifo:query_messages_checked_out/1)"
    count = f"{{ok, {{_, Count}}, _}} = {asked}, Count"
    expression = f"case rabbit_amqqueue:lookup({name}) of {{ok, Queue}} -> {count}; _ -> 0 end."
    if "CI" not in os.environ:
        return int(evaluated(expression) or 0)
    return int(wait_until(lambda: evaluated(expression), timeout_s=30))


def _done(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


def own_queues() -> dict[str, str]:
    """Settings that name queues which no other test uses."""
    suffix = uuid.uuid4().hex
    return {f"queues.{kind}": f"{kind}-{suffix}" for kind in QUEUES}


class RabbitMQ:
    """Queues of one test: settings that name them, and a look at what the broker has."""

    def __init__(self, url: str, redis_url: str) -> None:
        self._endpoints = {"broker.url": url, "redis.url": redis_url}
        self._names = own_queues()
        self._connection = Connection(url)

    def settings(self, **changed: object) -> Settings:
        """Settings with these queues; ``broker__delivery_limit=2`` changes one."""
        return load_settings(
            {**self._endpoints, **self._names, **{name.replace("__", "."): value for name, value in changed.items()}}
        )

    def name(self, kind: str) -> str:
        """Name of the queue of traces, intake, accepted, rejected or dead."""
        return self._names[f"queues.{kind}"]

    def waiting(self, kind: str) -> int:
        """Messages on a queue that nobody has in hand; 0 if there is no such queue."""
        with self._connection.channel() as channel:
            try:
                return int(channel.queue_declare(self.name(kind), passive=True).message_count)
            except NotFound:
                return 0

    def delete(self, kind: str) -> int:
        """Delete a queue; return how many messages went with it."""
        with self._connection.channel() as channel:
            return int(channel.queue_delete(self.name(kind)))

    def delete_exchange(self) -> None:
        """Delete the exchange that submissions go by."""
        with self._connection.channel() as channel:
            channel.exchange_delete(self.name("traces"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for queue in QUEUES:
            self.delete(queue)
        self.delete_exchange()
        self._connection.close()
