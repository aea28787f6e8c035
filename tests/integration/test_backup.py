"""The documents' own commands copy and restore the ledger's Redis; then what was pending in the copy is decided."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.loading import as_environment

from tests.support.commands import command, run_in_shell
from tests.support.documents import blocks, code_with
from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S, at_work, free_port
from tests.support.rabbitmq import own_queues, rabbitmq_in_use
from tests.support.servers import RedisServer, default_server, redis_cli, redis_servers
from tests.support.traces import fresh_samples

PASSWORD = "secret-of-backup"


def take_copy(server: RedisServer, copy: Path) -> None:
    """Take a copy with the command of the documents, as the user that they make for it."""
    (user,) = [block for block in blocks("deploy/OPERATIONS.md") if block.startswith("user backup ")]
    _, name, *rules = user.replace("PASSWORD-OF-backup", f">{PASSWORD}").split()
    with server.connect() as client:
        client.execute_command("ACL", "SETUSER", name, *rules)
        # By default, newer servers wait five seconds for others that want a copy, too.
        client.config_set("repl-diskless-sync-delay", 0)
    shown = code_with("--rdb copy.rdb").replace("PASSWORD-OF-backup", PASSWORD)
    in_shell(shown.replace("HOST", "127.0.0.1").replace("6379", str(server.port)), copy.parent)


def restore(copy: Path, directory: Path, executable: str) -> None:
    """Convert a copy, as the documents show, to the data from which a server with an append-only file starts."""
    directory.mkdir()
    shutil.copy(copy, directory / "copy.rdb")
    for name in ("redis.conf", "users.acl"):
        shutil.copy(REPOSITORY / "deploy" / name, directory)
    block = code_with("cp copy.rdb dump.rdb").replace("6380", str(free_port()))
    # Skip the last line, which starts the permanent server: its port and passwords differ from the test's.
    *lines, last = block.splitlines()
    assert last == "redis-server redis.conf"
    in_shell("\n".join(lines).replace("redis-server", executable), directory)


def in_shell(commands: str, directory: Path) -> None:
    done = run_in_shell(commands, directory, PATH=f"{Path(redis_cli()).parent}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("executable", redis_servers())
def test_a_copy_restored_as_documented_survives_restarts_and_a_bare_one_is_ignored(executable: str, tmp_path: Path) -> None:
    copy, old, new = tmp_path / "copy.rdb", tmp_path / "old", tmp_path / "new"
    with RedisServer(old, executable) as server, server.connect() as client:
        client.set("kp:some", "thing")
        take_copy(server, copy)
    for path in old.iterdir():
        if path.name.startswith("appendonly"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copy(copy, old / "dump.rdb")
    with RedisServer(old, executable) as server, server.connect() as client:
        assert client.dbsize() == 0, "the documents warn of what is no longer so"
    restore(copy, new, executable)
    with RedisServer(new, executable) as server, server.connect() as client:
        assert client.get("kp:some") == b"thing"


def test_traces_pending_in_a_restored_copy_are_decided_with_an_empty_broker(rabbitmq_url: str, tmp_path: Path) -> None:
    traces = fresh_samples(5)
    with rabbitmq_in_use(), RedisServer(tmp_path / "lost") as server:
        settings = settings_on(rabbitmq_url, server)
        erased, decided, pending, twice, unknown = (str(trace["id"]) for trace in traces)
        with at_work(settings, tmp_path) as (worker, client):
            for trace in traces[:2]:
                client.wait(client.submit(trace), timeout_s=PATIENCE_S)
            # While the worker is stopped nobody decides, so that the copy holds pending traces.
            worker.process.send_signal(signal.SIGSTOP)
            client.submit_many(traces[2:4])
            take_copy(server, tmp_path / "copy.rdb")
            worker.process.send_signal(signal.SIGCONT)
            first = client.wait(twice, timeout_s=PATIENCE_S)
            client.wait(pending, timeout_s=PATIENCE_S)
            client.wait(client.submit(traces[4]), timeout_s=PATIENCE_S)
            assert command(settings, "forget", erased).exit_code == 0
    restore(tmp_path / "copy.rdb", tmp_path / "new", default_server())
    with rabbitmq_in_use(), RedisServer(tmp_path / "new") as server:
        settings = settings_on(rabbitmq_url, server)
        with Client(settings) as client:
            states = [status and status.state for status in client.look_up([erased, decided, pending, twice, unknown])]
            assert states == ["decided", "decided", "pending", "pending", None]
            # Besides the erased id, twice, the list has the beginning of an id, and texts that would be ids once they are
            # unquoted.
            noted = [erased, decided[:-1], f"{decided[:-1]}\\{decided[-1]}", f"'{twice}'", erased]
            assert erased_again(settings, noted, tmp_path) == 1
            states = [status and status.state for status in client.look_up([erased, decided, pending, twice])]
            assert states == [None, "decided", "pending", "pending"]
            with at_work(settings, tmp_path):
                for trace_id in (pending, twice):
                    client.wait(trace_id, timeout_s=PATIENCE_S)
                assert client.wait(twice, timeout_s=PATIENCE_S).decided_at > first.decided_at
                client.wait(client.submit(traces[4]), timeout_s=PATIENCE_S)
            assert client.look_up([erased]) == [None]
        stats = json.loads(command(settings, "stats").stdout)
        # Decided traces still count after they have been erased.
        assert [stats[name] for name in ("submitted", "pending", "decided", "dead")] == [5, 0, 5, 0]
        audit = command(settings, "audit")
        assert audit.exit_code == 0, audit.output
        assert re.search(r"\b4\b", audit.stderr), audit.stderr


def erased_again(settings: Settings, trace_ids: list[str], directory: Path) -> int:
    """Erase these traces with the command of the documents; return its exit status."""
    (directory / "erased.txt").write_text("".join(f"{trace_id}\n" for trace_id in trace_ids), "utf-8")
    shown, *_ = code_with("erased.txt").splitlines()
    return run_in_shell(shown, directory, **as_environment(settings)).returncode


def settings_on(broker_url: str, server: RedisServer) -> Settings:
    """Return settings with queues that nobody else uses, and with which a loss is noticed soon."""
    return load_settings({"broker.url": broker_url, "redis.url": server.url, "ledger.resend_after_s": 0.5, **own_queues()})
