"""`kp-scorer forget` and `export` reach all data of an agent or of a namespace, wherever it is in Redis."""

import base64
import json
from collections import Counter
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from celery import Celery
from kombu import Queue
from kp_scorer.client import Client
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.runs import ReceivedSpan

from tests.support.builders import minimal_payload
from tests.support.changed_settings import with_changed
from tests.support.commands import command
from tests.support.processes import PATIENCE_S, at_work, wait_until
from tests.support.traces import rows_in

ALICE: Final = "agent-alice"
BOB: Final = "agent-bob"
NAMESPACES: Final = {ALICE: "shop", BOB: "bank"}
RUN_ID: Final = f"{7:032x}"


def trace_of(agent: str, name: str, **changes: Any) -> dict[str, Any]:
    """Return a trace that names its agent in its id, its metadata and its texts."""
    payload = minimal_payload(trace_id=f"kp:trace:{NAMESPACES[agent]}:{name}", objective=f"text of {agent} {name}")
    payload["metadata"]["agent_id"] = agent
    return payload | changes


def fill(settings: Settings, store: Store, client: redis.Redis, directory: Path, agents: tuple[str, ...]) -> None:
    """Store decisions and a dead letter of each agent, and submit a trace and a late outcome that nobody decides."""
    with at_work(settings, directory) as (worker, scorer):
        for agent in agents:
            for number in range(3):
                scorer.wait(scorer.submit(trace_of(agent, f"decided-{number}")), timeout_s=PATIENCE_S)
            client.lpush("traces", json.dumps(trace_of(agent, "dead", steps=[])))
        wait_until(lambda: len(worker.events("trace_dead")) == len(agents))
        wait_until(lambda: store.ledger.counts().pending == 0)
    with Client(settings) as scorer:
        for agent in agents:
            scorer.submit(trace_of(agent, "waits"))
            scorer.submit_outcome(f"kp:trace:{NAMESPACES[agent]}:decided-0", success=False, reason=f"says {agent}")


def collect(store: Store, agent: str, run_id: str) -> None:
    attributes = [{"key": "service.name", "value": {"stringValue": agent}}]
    span = ReceivedSpan(f"{1:016x}", json.dumps({"name": f"of {agent}", "attributes": attributes}).encode())
    assert store.runs.store(run_id, [span])[0] == "stored"


def everything(client: redis.Redis) -> str:
    """Return the server's keys and values, without reports of workers and with messages decoded, as one text."""
    reads: dict[Any, Any] = {
        b"string": client.get,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"hash": lambda key: sorted(dict(client.hgetall(key)).items()),
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"stream": client.xrange,
    }
    texts = []
    keys: Any = client.keys("*")
    for key in sorted(key for key in keys if not key.startswith(b"kp:worker")):
        value = reads[client.type(key)](key)
        texts.append(f"{key!r} {value!r}")
        for item in value if isinstance(value, list) else ():
            with suppress(ValueError, TypeError, KeyError):
                texts.append(repr(base64.b64decode(json.loads(item)["body"])))
    return "\n".join(texts)


@pytest.mark.parametrize("via", ["queue", "stream"])
@pytest.mark.parametrize("option", ["--agent", "--namespace"])
def test_all_data_of_a_subject_is_exported_and_erased_and_no_data_of_others(
    settings: Settings, store: Store, redis_client: redis.Redis, via: str, option: str, tmp_path: Path
) -> None:
    # By default, decisions of others name the nearest trace by its id until they expire.
    chosen = with_changed(settings, results__via=via, results__with_trace=True, results__nearest=False, scoring__threshold=1.0)
    fill(chosen, store, redis_client, tmp_path, (ALICE, BOB))
    collect(store, ALICE if option == "--agent" else BOB, RUN_ID)
    asked = option, ALICE if option == "--agent" else NAMESPACES[ALICE]
    expected = {"decisions.rejected": 3, "traces": 2, "dead_letters": 1, "vectors": 3}
    # There is a record for each of three decisions, the dead trace, the one that waits, and the late outcome.
    expected |= {"records": 6} | ({"runs": 1} if option == "--agent" else {})

    before = everything(redis_client)
    exported = command(chosen, "export", *asked)
    assert Counter(row["place"] for row in rows_in(exported.stdout)) == expected
    assert BOB not in exported.stdout
    assert all(ALICE in json.dumps(row) for row in rows_in(exported.stdout) if row["place"] not in ("vectors", "records"))
    assert everything(redis_client) == before

    done = command(chosen, "forget", *asked)
    assert done.exit_code == 0, done.output
    places = ("vectors", "records", "dead_letters", "runs")
    rows = rows_in(done.stdout)
    # The record of the dead trace disappears with its dead letter, and is not counted.
    counts = expected | {"records": expected["records"] - 1}
    assert {place: sum(row[place] for row in rows) for place in places} == {place: counts.get(place, 0) for place in places}
    assert f"erased {len(rows)} traces: " in done.stderr
    assert "decisions.rejected 3, traces 2" in done.stderr or "traces 2, decisions.rejected 3" in done.stderr
    left = everything(redis_client)
    assert [line for line in left.splitlines() if ALICE in line or f"{NAMESPACES[ALICE]}:" in line] == []
    assert left.count(BOB) == before.count(BOB)
    store.dead_letters.dead_letter(b"\xff", DeadLettering("malformed", "expected JSON"))
    redis_client.zadd("traces.renewed", {"digest": 1})
    again = command(chosen, "forget", *asked)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "1 dead letters do not say whose they are" in again.stderr
    assert "1 messages of traces are in flight and were not searched" in again.stderr


def test_all_lists_of_each_queue_are_searched(settings: Settings, redis_client: redis.Redis) -> None:
    both = with_changed(settings, queues__traces={"traces": {}, "traces.others": {}})
    with Celery("producer", broker=settings.broker.url, set_as_current=False) as app:
        for name, priority, agent in product(both.queues.traces, (0, 3, 9), (ALICE, BOB)):
            trace = trace_of(agent, f"{name}-{priority}")
            app.send_task("score_trace", args=[trace], queue=Queue(name, no_declare=True), priority=priority)
    before = everything(redis_client)
    exported = command(both, "export", "--agent", ALICE)
    assert Counter(row["place"] for row in rows_in(exported.stdout)) == {"traces": 3, "traces.others": 3}
    done = command(both, "forget", "--agent", ALICE)
    assert (done.exit_code, "traces 3, traces.others 3" in done.stderr) == (0, True)
    left = everything(redis_client)
    assert (left.count(ALICE), left.count(BOB)) == (0, before.count(BOB))
