"""Two versions on one Redis: workers, clients and operators of both go on with what the other has begun."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.arena import IMPATIENT, SEED, settle, submit
from tests.support.checker import check
from tests.support.processes import Worker, wait_until
from tests.support.servers import RedisServer
from tests.support.traces import new_id, short_traces
from tests.support.versions import Version, install_previous, this_version

AT_ONCE: Final = 60

Payload = dict[str, Any]
Run = Callable[..., list[Payload]]
"""Runs a command of a version and gives what it prints."""


@pytest.fixture(scope="session")
def previous_version(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """The version before this one."""
    return install_previous(tmp_path_factory.mktemp("previous"))


class Books:
    """One Redis, and all that was submitted there by either version."""

    def __init__(self, server: RedisServer, old: Version) -> None:
        """Have both versions read the file of settings that came with the old one."""
        config = old.source / "config" / "kp-scorer.toml"
        changed: dict[str, object] = {"broker.url": server.url, "redis.url": server.url, **IMPATIENT}
        self.settings: Settings = load_settings(changed, config)
        self.variables = {f"KP_{name}".replace(".", "_").upper(): str(value) for name, value in changed.items()}
        self.variables |= {"KP_CONFIG": str(config), "EMBED_S": "0.1"}
        self.server = server
        self.old_version = old
        self.old: Run = partial(old.run, self.variables)
        self.new: Run = partial(this_version().run, self.variables)
        self.submitted: list[str] = []
        self._load = iter(short_traces(10 * AT_ONCE, SEED))

    def take(self, count: int = AT_ONCE) -> list[Payload]:
        """Traces that nobody has seen yet."""
        return [next(self._load) for _ in range(count)]

    def submit_by_both(self, by_old: Sequence[Payload], by_new: Sequence[Payload]) -> None:
        """Submit some by the old command line, and some by the new client."""
        if by_old:
            assert {row["state"] for row in self.old("submit", "-", stdin=_lines(by_old))} == {"pending"}
        with Client(self.settings) as client:
            submit(client, by_new)
        self.submitted += [trace["id"] for trace in (*by_old, *by_new)]

    def settle(self) -> None:
        """Wait until all that was submitted is decided or dead."""
        settle(self.settings, self.submitted)

    def redeliver(self, known: Sequence[Payload], worker: Worker) -> None:
        """Have a worker decide once more what is decided; it publishes the first decisions again."""
        ids, before = {trace["id"] for trace in known}, len(worker.events("trace_decided"))
        with self.server.connect() as client:
            client.lpush(self.settings.queues.traces, *map(json.dumps, known))
        wait_until(lambda: ids <= {row["trace_id"] for row in worker.events("trace_decided")[before:]})

    def replay(self, by: Run) -> None:
        """Have a version submit again the only dead letter, which the other one has buried."""
        (letter,) = by("dead-letter", "replay")
        assert letter["state"] == "pending"


@pytest.mark.slow
def test_workers_are_replaced_by_those_of_another_version_and_back(previous_version: Version, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        books = Books(server, previous_version)
        decided_by_new = _upgrade(books, tmp_path)
        _go_back(books, decided_by_new, tmp_path)
        taken = books.old("decisions", "--limit", str(AT_ONCE))
        assert len(taken) == AT_ONCE
        check(books.settings, books.submitted, taken=taken, replayed=2, two_versions=True)
        # What the checker looks up and audits by this version, the other one sees too.
        books.old("audit")
        by_old = [row["decision"] for row in books.old("status", *books.submitted)]
        with Client(books.settings) as client:
            by_new = [
                found.decision.model_dump(mode="json") for found in client.look_up(books.submitted) if found and found.decision
            ]
        assert [_essence(decision) for decision in by_old] == [_essence(decision) for decision in by_new]
        assert len({decision["domain"] for decision in by_old}) > 2
        with Store.open(books.settings) as store:
            assert list(store.dead_letters.read()) == [], "what is redelivered to the other version is a conflict there"


def _upgrade(books: Books, logs: Path) -> list[Payload]:
    """Have new workers take the place of old ones; return what these have decided alone."""
    by_old, by_new, (long, longer) = books.take(), books.take(), books.take(2)
    few_steps = books.variables | {"KP_LIMITS_STEPS": "3"}
    with (
        books.old_version.worker(few_steps, logs / "old-1.log") as killed,
        books.old_version.worker(few_steps, logs / "old-2.log") as told,
    ):
        books.submit_by_both([*by_old, _of_steps(5, long)], by_new)
        books.settle()
        with this_version().worker(books.variables | {"KP_LIMITS_STEPS": "7"}, logs / "new.log") as beside:
            decided_before = [len(worker.events("trace_decided")) for worker in (killed, told, beside)]
            books.submit_by_both([*books.take(), *_copies(by_new[:5])], [*books.take(2 * AT_ONCE), *_copies(by_old[:5])])
            wait_until(lambda: _have_decided([killed, told, beside], decided_before))
            books.submit_by_both([], books.take(2 * AT_ONCE))
            killed.process.kill()
            told.process.terminate()
            assert told.process.wait(40) == 0, told.text()
            books.redeliver([*by_old, *by_new], beside)
            books.replay(by=books.new)
            last = books.take()
            books.submit_by_both([_of_steps(9, longer)], last)
            books.settle()
        assert beside.process.returncode == 0, beside.text()
    return last


def _go_back(books: Books, decided_by_new: Sequence[Payload], logs: Path) -> None:
    """Have an old worker take the place of the new ones."""
    with books.old_version.worker(books.variables, logs / "back.log") as back:
        books.replay(by=books.old)
        books.submit_by_both(_copies(decided_by_new[:5]), books.take())
        books.settle()
        books.redeliver(decided_by_new, back)
    assert back.process.returncode == 0, back.text()


def _have_decided(workers: Sequence[Worker], before: Sequence[int]) -> bool:
    return all(len(worker.events("trace_decided")) > count for worker, count in zip(workers, before, strict=True))


def _essence(decision: Payload) -> Payload:
    """What a decision says, without what a later version may say besides."""
    names = ("trace_id", "outcome", "score", "threshold", "dimensions", "decided_at")
    in_novelty = ("entry", "duplicate_of", "space")
    return {name: decision[name] for name in names} | {name: decision["novelty"][name] for name in in_novelty}


def _lines(traces: Sequence[Payload]) -> str:
    return "".join(json.dumps(trace) + "\n" for trace in traces)


def _copies(traces: Sequence[Payload]) -> list[Payload]:
    """The same content under other ids."""
    return [trace | {"id": new_id()} for trace in traces]


def _of_steps(count: int, trace: Payload) -> Payload:
    return trace | {"steps": [{"step_id": number, "type": "thought"} for number in range(count)]}
