"""All decisions of a ledger, as a program and as the command line read them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from kp_scorer import rows, stored_decisions
from kp_scorer.cli.main import commands
from kp_scorer.settings import Settings
from kp_scorer.store import Identity, Store, Tally, Verdict

from tests.support.builders import decision_on


def keep(store: Store, count: int) -> set[str]:
    """Have the ledger keep so many decisions; return the ids of their traces."""
    trace_ids = [f"kp:trace:{number}" for number in range(count)]
    store.ledger.begin([Identity(trace_id, bytes(16)) for trace_id in trace_ids])
    store.ledger.commit(
        [Verdict(trace_id, bytes(16), decision_on(trace_id), "", Tally("code", is_known=True)) for trace_id in trace_ids]
    )
    return set(trace_ids)


def test_every_stored_decision_is_read_as_it_was_made(settings: Settings, store: Store) -> None:
    trace_ids = keep(store, 5)
    # One that is pending has none.
    store.ledger.begin([Identity("kp:trace:pending", bytes(16))])
    found = list(stored_decisions(settings))
    assert {decision.trace_id for decision in found} == trace_ids
    assert {decision.model_dump_json().encode() for decision in found} == {decision_on(trace_id) for trace_id in trace_ids}
    assert {row.trace_id for row in rows(found)} == trace_ids


def test_an_empty_ledger_holds_none(settings: Settings) -> None:
    assert list(stored_decisions(settings)) == []


def test_commands_look_at_stored_decisions_and_leave_them_as_they_are(
    settings: Settings, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, 70)
    monkeypatch.setenv("KP_BROKER_URL", settings.broker.url)
    file = tmp_path / "thresholds.toml"
    before = sorted(decision.model_dump_json() for decision in stored_decisions(settings))
    calibrated = CliRunner().invoke(commands, ["calibrate", "--stored", "--accept", "20%", "--output", str(file)])
    assert calibrated.exit_code == 0, calibrated.output
    decided_again = CliRunner().invoke(commands, ["re-decide", "--stored", "--thresholds", str(file)])
    assert decided_again.exit_code == 0, decided_again.output
    # All have one score, which is below the threshold that they met.
    assert {row["outcome_after"] for row in map(json.loads, decided_again.stdout.splitlines())} == {"accepted"}
    assert len(decided_again.stdout.splitlines()) == 70
    assert sorted(decision.model_dump_json() for decision in stored_decisions(settings)) == before
