"""A real RabbitMQ, with queues that belong to one test."""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import amqp
import pytest
from amqp.exceptions import NotFound
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.queues import submission_queues
from kp_scorer.process.startup import StartupRetry, wait_for_services
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.documents import code_with
from tests.support.processes import PATIENCE_S, free_port, wait_until
from tests.support.required import required

RABBITMQ_URL: Final = os.environ.get("TEST_RABBITMQ_URL", "amqp://guest:guest@localhost:5672//")
QUEUES: Final = ("traces", "accepted", "review", "rejected", "revised")

PATIENT: Final = {"broker.timeout_s": 20.0}
"""Settings for a RabbitMQ that tests share.

All its quorum queues write to one log, so a large message of one test delays the others.
"""

LARGEST_BYTES: Final = 2**24
"""The largest message that RabbitMQ 4 accepts by default."""

_ACTOR: Final = "kp-scorer-tests"
"""The user to whom RabbitMQ's log attributes the changes."""

_RABBITMQ: Final = "/usr/lib/rabbitmq/bin"
"""The folder of RabbitMQ's own programs. Those on the PATH act as another user, and on the machine's own RabbitMQ."""
_MISSING: Final = "install Debian's package rabbitmq-server"

_LOCK: Final = Path(tempfile.gettempdir()) / "kp-test-rabbitmq.lock"
_is_alone = False


@contextmanager
def rabbitmq_in_use(*, alone: bool = False) -> Iterator[None]:
    """Keep the RabbitMQ on this machine as it is during the block; or reserve it, ``alone``, for a test that changes it.

    Tests in other processes wait meanwhile, so that none runs on a RabbitMQ that another test has changed. Within the process
    that has it alone, further contexts have no effect.
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
    """Yield the URL of a new virtual host, and remove it afterwards; where this user may make none, yield ``url``."""
    with Connection(url) as connection:
        user, is_local = connection.userid, connection.hostname in ("localhost", "127.0.0.1")
    if is_local:
        _delete_virtual_hosts_of_the_dead()
    name = f"kp-test-{os.getpid()}-{uuid.uuid4().hex}"
    if not (is_local and evaluated(f"rabbit_vhost:add({_texts(name, _ACTOR)}).") == "ok"):
        yield url
        return
    try:
        _permit(user, name, ".*", ".*", ".*")
        yield f"{url.rpartition('@')[0]}@{url.rpartition('@')[2].partition('/')[0]}/{name}"
    finally:
        evaluated(f"rabbit_vhost:delete({_texts(name, _ACTOR)}).")


def _delete_virtual_hosts_of_the_dead() -> None:
    """Delete the virtual hosts of killed runs. Their quorum queues keep files open, until RabbitMQ cannot open more."""
    pids = '{match, [Pid]} <- [re:run(Name, "^kp-test-([0-9]+)-", [{capture, [1], list}])]'
    is_dead = 'filelib:is_dir("/proc/self"), not filelib:is_dir("/proc/" ++ Pid)'
    evaluated(f"[rabbit_vhost:delete(Name, {_texts(_ACTOR)}) || Name <- rabbit_vhost:list_names(), {pids}, {is_dead}].")


@contextmanager
def default_queues(url: str, redis_url: str) -> Iterator[Settings]:
    """Yield settings with the default names of queues, in a virtual host of their own; skip the test where none can be made."""
    with own_virtual_host(RABBITMQ_URL) as own_url:
        if "kp-test-" not in own_url or own_url == url:
            pytest.skip("nobody here may make a virtual host: run the tests as root")
        yield load_settings({"broker.url": own_url, "redis.url": redis_url})


def declare_as_worker(settings: Settings, patience_s: float = 120.0) -> None:
    """Do what a worker does before it consumes: declare its queues."""
    with make_celery(settings) as app, Store.open(settings) as store:
        queues = submission_queues(settings.broker, settings.queues).values()
        wait_for_services(settings, app, store, queues, StartupRetry(patience_s, lambda: None))


def confirming(url: str) -> Connection:
    """Return a connection on which each publish waits for its confirm.

    Without confirms, RabbitMQ 3.10.8 loses some of the messages that were sent just before a channel is closed.
    """
    return Connection(url, transport_options={"confirm_publish": True})


@contextmanager
def limited_by_policy(settings: Settings, queue: str, most: int) -> Iterator[None]:
    """Limit a queue in one of our virtual hosts to ``most`` messages, after a moment; skip the test where this user may not."""
    names = _texts(_own_name(settings.broker.url), "limited")
    policy = f'{names}, <<"^{queue}$">>, [{{<<"max-length">>, {most}}}], 0, <<"queues">>, <<"{_ACTOR}">>'
    _administer(f"rabbit_policy:set({policy}).")
    try:
        yield
    finally:
        evaluated(f'rabbit_policy:delete({names}, <<"{_ACTOR}">>).')


@contextmanager
def queues_limited(settings: Settings, most: int) -> Iterator[None]:
    """Limit one of our virtual hosts to ``most`` queues; skip the test where this user may not."""
    vhost = _own_name(settings.broker.url)
    _administer(f'rabbit_vhost_limit:set({_texts(vhost)}, [{{<<"max-queues">>, {most}}}], <<"{_ACTOR}">>).')
    try:
        yield
    finally:
        evaluated(f"rabbit_vhost_limit:clear({_texts(vhost, _ACTOR)}).")


def close_connections(settings: Settings) -> None:
    """Have RabbitMQ close all connections to one of our virtual hosts; skip the test where this user may not."""
    of_vhost = f"proplists:get_value(vhost, Each) =:= {_texts(_own_name(settings.broker.url))}"
    pids = f"[proplists:get_value(pid, Each) || Each <- rabbit_networking:connection_info_all([pid, vhost]), {of_vhost}]"
    _administer(f'lists:foreach(fun(Pid) -> rabbit_networking:close_connection(Pid, "{_ACTOR}") end, {pids}).')


def _own_name(url: str) -> str:
    """Return the name of the virtual host in a URL; skip the test if nobody here may administer it, as it is not ours."""
    vhost = url.rpartition("/")[2]
    if not vhost.startswith("kp-test-"):
        pytest.skip("nobody here may administer RabbitMQ: run the tests as root")
    return vhost


def _administer(expression: str) -> None:
    """Have RabbitMQ evaluate an expression; skip the test where this user may not."""
    if evaluated(expression) != "ok":
        pytest.skip("nobody here may administer RabbitMQ: run the tests as root")


def evaluated(expression: str) -> str:
    """Evaluate an Erlang expression in the RabbitMQ on this machine; return its value, empty where this user may not."""
    # rabbitmqctl would start a virtual machine for each call, which takes a second of processor time. erl_call, which comes
    # with Erlang, starts none.
    if erl_call := shutil.which("erl_call"):
        # erl_call needs the cookie of the server's user, so it runs as that user, as Debian's rabbitmqctl does.
        as_server = ["runuser", "-u", "rabbitmq", "--"] if os.geteuid() == 0 else []
        if value := _value_from(*as_server, erl_call, "-sname", "rabbit", expression=expression):
            return value
    return _output_of("rabbitmqctl", "eval", expression) if shutil.which("rabbitmqctl") else ""


def _value_from(*erl_call: str, expression: str, **options: Any) -> str:
    """Return the value of an expression by erl_call; empty if it fails."""
    reply = _output_of(*erl_call, "-e", input=f"{expression}\n", **options)
    return reply.removeprefix("{ok, ").removesuffix("}") if reply.startswith("{ok, ") else ""


def _output_of(*command: str, **options: Any) -> str:
    """Return the output of a command; empty if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, **options)
    return result.stdout.strip() if result.returncode == 0 else ""


def _permit(user: str, virtual_host: str, *permissions: str) -> None:
    """Let a user configure, write and read whatever these three patterns match."""
    arguments = _texts(user, virtual_host, *permissions, _ACTOR)
    _carry_out(f"rabbit_auth_backend_internal:set_permissions({arguments}).")


def _carry_out(expression: str) -> None:
    """Have RabbitMQ evaluate an expression. Try again if it does not answer, as RabbitMQ 4.3 may not under load."""
    wait_until(lambda: evaluated(expression) in ("ok", "true"))


def _texts(*texts: str) -> str:
    """Return texts as Erlang binaries, joined by commas as arguments are."""
    # JSON and Erlang escape characters in the same way.
    return ", ".join(f"<<{json.dumps(text)}>>" for text in texts)


def unacknowledged(url: str, queue: str) -> int:
    """Return the number of unacknowledged messages of a quorum queue; 0 where this user may not ask the server.

    Under CI the user may, and the question is repeated until it is answered, for example once the queue has a leader again. The
    queue's leader is asked because AMQP does not carry the number, and rabbitmqctl's is up to five seconds old.
    """
    with Connection(url) as connection:
        name = f'rabbit_misc:r(<<"{connection.virtual_host}">>, queue, <<"{queue}">>)'
    query = "ra:leader_query(amqqueue:get_pid(Queue), fun rabbit_fifo:query_messages_checked_out/1)"
    count = f"{{ok, {{_, Count}}, _}} = {query}, Count"
    expression = f"case rabbit_amqqueue:lookup({name}) of {{ok, Queue}} -> {count}; _ -> 0 end."
    if "CI" not in os.environ:
        return int(evaluated(expression) or 0)
    return int(wait_until(lambda: evaluated(expression)))


def own_queues() -> dict[str, str]:
    """Return settings that name queues which no other test uses."""
    suffix = uuid.uuid4().hex
    return {f"queues.{kind}": f"{kind}-{suffix}" for kind in ("traces", "decisions")}


class RabbitMQ:
    """The queues of one test: settings that name them, and their contents at the broker."""

    def __init__(self, url: str, redis_url: str) -> None:
        self._endpoints = {"broker.url": url, "redis.url": redis_url}
        self._names = own_queues()
        self._connection = Connection(url)

    def settings(self, **changed: object) -> Settings:
        """Return settings with these queues; ``worker__max_attempts=2`` changes one."""
        return load_settings(
            {**self._endpoints, **self._names, **PATIENT, **{name.replace("__", "."): value for name, value in changed.items()}}
        )

    def name(self, kind: str) -> str:
        """Return the name of a queue, given as traces, intake, accepted, rejected or dead."""
        if kind == "traces":
            return self._names["queues.traces"]
        return f"{self._names['queues.traces' if kind in ('intake', 'dead') else 'queues.decisions']}.{kind}"

    def waiting(self, kind: str) -> int:
        """Return the number of messages on a queue that are ready to be delivered; 0 if there is no such queue."""
        with self._connection.channel() as channel:
            try:
                return int(channel.queue_declare(self.name(kind), passive=True).message_count)
            except NotFound:
                return 0

    def send(self, kind: str, *bodies: bytes, **properties: Any) -> None:
        """Send bodies, which are JSON, to a queue."""
        with confirming(self._endpoints["broker.url"]) as connection:
            for body in bodies:
                message = amqp.Message(body, content_type="application/json", **properties)
                connection.default_channel.basic_publish(message, routing_key=self.name(kind))

    def delete(self, kind: str) -> int:
        with self._connection.channel() as channel:
            return int(channel.queue_delete(self.name(kind)))

    def delete_exchange(self) -> None:
        with self._connection.channel() as channel:
            channel.exchange_delete(self.name("traces"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for queue in (*QUEUES, "intake", "dead"):
            self.delete(queue)
        self.delete_exchange()
        self._connection.close()


class OwnNode:
    """A RabbitMQ that belongs to one test, so that its alarms stop nobody else."""

    def __init__(self, directory: Path) -> None:
        self._variables = {
            **os.environ,
            "HOME": str(directory),
            "RABBITMQ_NODENAME": f"kp-test-{uuid.uuid4().hex}@localhost",
            "RABBITMQ_NODE_PORT": str(port := free_port()),
            "RABBITMQ_DIST_PORT": str(dist_port := free_port()),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            # Keep the machine's own configuration out, because it may set the port.
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        }
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"
        self._address = f"127.0.0.1:{dist_port}"

    def limit_memory(self, share: float) -> None:
        """Let RabbitMQ use this share of the machine's memory before it raises its alarm."""
        assert self._evaluated(f"vm_memory_monitor:set_vm_memory_high_watermark({share}).") == "ok"

    def connections(self) -> int:
        return int(self._evaluated("length(rabbit_networking:connections())."))

    def _evaluated(self, expression: str) -> str:
        if erl_call := shutil.which("erl_call"):
            return _value_from(erl_call, "-address", self._address, expression=expression, env=self._variables)
        return _output_of(required(f"{_RABBITMQ}/rabbitmqctl", _MISSING), "eval", expression, env=self._variables)

    def __enter__(self) -> Self:
        command = [required(f"{_RABBITMQ}/rabbitmq-server", _MISSING)]
        self._server = subprocess.Popen(command, env=self._variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: self._answers() or self._server.poll() is not None, timeout_s=120)
            assert self._server.poll() is None, "it has ended"
        except BaseException:
            self.__exit__()
            raise
        return self

    def _answers(self) -> bool:
        try:
            with Connection(self.url, connect_timeout=5) as connection:
                connection.connect()
        except OSError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        self._server.wait(60)


@contextmanager
def own_user(url: str) -> Iterator[str]:
    """Make a user with the password ``first`` and all permissions in a virtual host; skip the test where that is forbidden."""
    virtual_host, user = url.rpartition("/")[2], f"user-{uuid.uuid4().hex}"
    _administer(f"rabbit_auth_backend_internal:add_user({_texts(user, 'first', _ACTOR)}).")
    try:
        _permit(user, virtual_host, ".*", ".*", ".*")
        yield user
    finally:
        evaluated(f"rabbit_auth_backend_internal:delete_user({_texts(user, _ACTOR)}).")


def change_password(user: str, password: str) -> None:
    assert evaluated(f"rabbit_auth_backend_internal:change_password({_texts(user, password, _ACTOR)}).") == "ok"


class Users:
    """The documented users in a virtual host, under names of their own. In Redis they have all permissions."""

    def __init__(self, url: str, redis_url: str) -> None:
        self.suffix = uuid.uuid4().hex
        self._url, self._redis_url = url, redis_url

    def url(self, user: str) -> str:
        return f"amqp://{user}-{self.suffix}:secret@{self._url.rpartition('@')[2]}"

    def settings(self, user: str) -> Settings:
        return load_settings({"broker.url": self.url(user), "redis.url": self._redis_url})


@contextmanager
def documented_users(url: str, redis_url: str) -> Iterator[Users]:
    """Make the users of the documents with their permissions; skip the test where that is not allowed."""
    virtual_host, users = _own_name(url), Users(url, redis_url)
    rules = [shlex.split(line)[4:] for line in code_with("rabbitmqctl set_permissions").splitlines()]
    named = [(f"{user}-{users.suffix}", permissions) for user, *permissions in rules]
    try:
        for name, permissions in named:
            is_there = f"rabbit_auth_backend_internal:exists({_texts(name)})"
            _carry_out(f"{is_there} orelse rabbit_auth_backend_internal:add_user({_texts(name, 'secret', _ACTOR)}).")
            _permit(name, virtual_host, *permissions)
        yield users
    finally:
        for name, _ in named:
            evaluated(f"rabbit_auth_backend_internal:delete_user({_texts(name, _ACTOR)}).")
