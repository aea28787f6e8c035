"""A change of the model: the new space is warmed, and its workers know from the first decision on what was scored before."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kp_scorer.client import Client
from kp_scorer.novelty.audit import audit
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.arena import submit
from tests.support.builders import minimal_payload
from tests.support.commands import run
from tests.support.processes import FAST_WORKER, start_worker
from tests.support.traces import fresh_samples, new_id

Payload = dict[str, Any]


def lines(traces: Sequence[object]) -> str:
    return "".join(json.dumps(trace) + "\n" for trace in traces)


def decide(settings: Settings, traces: Sequence[Payload]) -> list[Payload]:
    """Submit traces, and give what their decisions say of novelty."""
    with Client(settings) as client:
        ids = submit(client, traces)
        return [client.wait(trace_id, timeout_s=60).novelty.model_dump() for trace_id in ids]


@pytest.mark.slow
def test_a_warmed_space_knows_what_was_scored_before(settings: Settings, store: Store, tmp_path: Path) -> None:
    *decided, unseen = known = fresh_samples(5)
    at_redis = {"KP_BROKER_URL": settings.broker.url}
    with start_worker(settings, tmp_path / "before.log", command=FAST_WORKER):
        decide(settings, decided)
    (old_log,) = store.novelty_logs()

    # One trace too many for the window, and one whose id is taken.
    taken = minimal_payload(trace_id=decided[0]["id"])
    small = ("--set", f"novelty.max_elements={len(known) + 1}")
    warmed = run("cache", "warm", "-", *small, stdin=lines([*fresh_samples(1), taken, "none", *known]), **at_redis)
    assert warmed.returncode == 1, warmed.stderr
    invalid, conflict, told = map(json.loads, warmed.stdout.splitlines())
    assert (invalid["line"], conflict["trace_id"], conflict["state"]) == (3, taken["id"], "conflict")
    assert (told["warmed"], told["entries"]) == (5, 5)
    (new_log,) = (log for log in store.novelty_logs() if log.space != old_log.space)
    assert (new_log.space, new_log.info().entries) == (told["space"], 5)
    again = run("cache", "warm", "-", stdin=lines(known), **at_redis)
    assert (again.returncode, again.stdout) == (2, "")
    assert "has 5 entries already" in again.stderr

    few = settings.model_copy(update={"novelty": settings.novelty.model_copy(update={"max_elements": len(known) + 1})})
    with start_worker(few, tmp_path / "after.log"):
        copies = [trace | {"id": new_id()} for trace in known]
        told_of_copies = decide(few, copies)
        (told_of_unseen,) = decide(few, [unseen])
    assert [found["duplicate_of"] for found in told_of_copies] == [trace["id"] for trace in known]
    assert told_of_unseen["duplicate_of"] is None, "it was compared with itself"
    report = audit(list(new_log.entries()), store.ledger.decided, few.novelty.window(), lambda done, total: None)
    assert (report.agreeing, report.differences) == (6, [])
    assert store.ledger.counts()[:3] == (10, 0, 10)
    forgotten = json.loads(run("forget", decided[1]["id"], **at_redis).stdout)
    assert forgotten["vectors"] == 2
