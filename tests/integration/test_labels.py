"""The ledger keeps a label as long as its decision, and erases both together.

Whatever reads stored decisions reads labels, too.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import redis
from click.testing import Result
from kp_scorer import stored_labels
from kp_scorer.decision import Decision
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Identity, Submission, Verdict

from tests.support.builders import decision, store_decisions
from tests.support.commands import command
from tests.support.traces import jsonl, rows_in

DIGEST = b"a" * 16
DECIDED = [f"kp:trace:{number}" for number in range(120)]
STORED = {
    trace_id: decision(trace_id, score=number / 120, sampled=0.5).model_dump_json().encode()
    for number, trace_id in enumerate(DECIDED)
}
PENDING, DEAD, UNKNOWN = "kp:trace:pending", "kp:trace:dead", "kp:trace:unknown"

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _traces_in_every_state(store: Store) -> None:
    store_decisions(store, STORED, DIGEST)
    store.ledger.submit([Submission(PENDING, DIGEST, b"{}")])
    store.dead_letters.dead_letter(b"{}", DeadLettering("invalid", "$", DEAD))


@pytest.fixture
def run(settings: Settings) -> Run:
    return partial(command, settings)


def as_lines(labels: dict[str, bool]) -> str:
    return jsonl(*({"trace_id": trace_id, "good": good} for trace_id, good in labels.items()))


def test_a_label_is_kept_with_the_decision_and_for_as_long(
    run: Run, store: Store, redis_client: redis.Redis, keys: Keys
) -> None:
    record = keys.record(DECIDED[0])
    redis_client.pexpire(record, 50_000)
    before = redis_client.hgetall(record)
    assert (run("label", DECIDED[0], "good").exit_code, redis_client.hget(record, "label")) == (0, b"good")
    assert run("label", DECIDED[0], "bad").exit_code == 0
    assert redis_client.hgetall(record) == {**before, b"label": b"bad"}
    assert 0 < redis_client.pttl(record) <= 50_000
    # A redelivered trace keeps its label.
    assert store.ledger.acquire([Identity(DECIDED[0], DIGEST)])[0].state == "decided"
    assert isinstance(store.ledger.commit([Verdict(DECIDED[0], DIGEST, b"other", "", "code", is_known=True)])[0], Decision)
    assert [record.good for record in store.ledger.look_up(DECIDED[:2]) if record] == [False, None]
    assert run("forget", DECIDED[0]).exit_code == 0
    assert redis_client.exists(record) == 0


def test_traces_that_are_not_decided_get_no_label_and_are_named(run: Run, redis_client: redis.Redis, keys: Keys) -> None:
    states = {PENDING: "pending", DEAD: "dead", UNKNOWN: "unknown"}
    for trace_id, state in states.items():
        refused = run("label", trace_id, "good")
        assert (refused.exit_code, rows_in(refused.stdout)) == (1, [{"trace_id": trace_id, "state": state}])
        assert not redis_client.hexists(keys.record(trace_id), "label")
    mixed = run("label", "--file", "-", stdin=as_lines(dict.fromkeys([*DECIDED, *states], True)))
    assert (mixed.exit_code, {row["trace_id"]: row["state"] for row in rows_in(mixed.stdout)}) == (1, states)
    assert f"labelled {len(DECIDED)} of {len(DECIDED) + 3}" in mixed.stderr
    redis_client.set(keys.record(UNKNOWN), "no hash", px=1_000)
    assert rows_in(run("label", UNKNOWN, "good").stdout) == [{"trace_id": UNKNOWN, "state": "unknown"}]


def test_labels_in_a_file_are_stored_and_printed_as_such_a_file(run: Run, settings: Settings, tmp_path: Path) -> None:
    labels = {trace_id: number % 3 > 0 for number, trace_id in enumerate(DECIDED[:-1])}
    (tmp_path / "labels.jsonl").write_text(as_lines(labels), "utf-8")
    assert run("label").stdout == ""
    assert run("label", "--file", str(tmp_path / "labels.jsonl")).exit_code == 0
    assert stored_labels(settings) == labels
    printed = run("label")
    assert (printed.exit_code, {row["trace_id"]: row["good"] for row in rows_in(printed.stdout)}) == (0, labels)
    assert run("label", "--file", "-", stdin=printed.stdout).exit_code == 0
    # The beginning of an id is enough, as for other commands that look at one trace.
    assert run("label", DECIDED[-1].removeprefix("kp:trace:"), "good").exit_code == 0
    assert stored_labels(settings) == {**labels, DECIDED[-1]: True}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["kp:trace:1"], "expected ID and good or bad, or --file"),
        (["kp:trace:1", "good", "--file", os.devnull], "expected ID and good or bad, or --file"),
        (["kp:trace:1", "fair"], "'fair' is not one of 'good', 'bad'"),
        (["--file", "-"], "line 1: good: Input should be a valid boolean"),
        (["--file", "missing"], "missing: No such file or directory"),
    ],
)
def test_wrong_usage_is_named_and_labels_nothing(run: Run, settings: Settings, arguments: list[str], problem: str) -> None:
    refused = run("label", *arguments, stdin='{"trace_id": "kp:trace:1", "good": "yes"}\n')
    assert refused.exit_code == 2
    assert problem in refused.stderr
    assert stored_labels(settings) == {}


def test_commands_that_read_stored_decisions_read_their_labels(run: Run, tmp_path: Path) -> None:
    assert "no trace has a label" in run("calibrate", "--stored", "--precision", "50%").stderr
    assert "label" not in run("report", "--stored", "--text").stdout
    run("label", "--file", "-", stdin=as_lines({trace_id: number > 50 for number, trace_id in enumerate(DECIDED)}))
    status = run("status", *DECIDED[49:52])
    assert [row["good"] for row in rows_in(status.stdout)] == [False, False, True]
    assert run("explain", DECIDED[0]).stdout.endswith("\nIt is labelled bad.\n")
    assert run("explain", DECIDED[99]).stdout.endswith("\nIt is labelled good.\n")
    report = run("report", "--stored", "--text").stdout
    assert {"label", "good", "bad"} <= {line.split()[-1] for line in report.splitlines() if line}
    of_ledger = run("calibrate", "--stored", "--precision", "50%")
    assert of_ledger.exit_code == 0
    assert "of these good" in of_ledger.stdout
    quality = run("quality", "--stored")
    assert "120 of 120 decisions with a label are sampled" in quality.stderr
    assert rows_in(quality.stdout)[0]["precision"]["value"] == 1
    # Labels in a file win over stored ones, and the output of `status` can serve as such a file.
    all_good = run("calibrate", "--stored", "--precision", "50%", "--labels", "-", stdin=as_lines(dict.fromkeys(DECIDED, True)))
    assert "100.0% (97-100%) of these good" in all_good.stdout
    (tmp_path / "states.jsonl").write_text(run("status", *DECIDED).stdout, "utf-8")
    assert run("calibrate", str(tmp_path / "states.jsonl"), "--precision", "50%").stdout == of_ledger.stdout


def test_a_new_decision_begins_without_the_label_of_the_old_one(store: Store, redis_client: redis.Redis, keys: Keys) -> None:
    store.ledger.label({DECIDED[0]: True})
    # Simulate a third party that alters a record in Redis.
    redis_client.hdel(keys.record(DECIDED[0]), "state")
    store_decisions(store, {DECIDED[0]: STORED[DECIDED[0]]}, DIGEST)
    (record,) = store.ledger.look_up([DECIDED[0]])
    assert record is not None
    assert (record.state, record.good) == ("decided", None)
