"""``kp-scorer keep``: the originals with one outcome and their scores, by scoring or by what the ledger decided."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from kp_scorer import score_traces
from kp_scorer.cli.main import commands
from kp_scorer.decider import Decider
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.builders import Payload, make_trace, minimal_payload, steps
from tests.support.commands import invoked, jsonl_file

RICH = steps("thought", "tool_call", "observation", "error_recovery")


def trace(name: str, confidence: float) -> Payload:
    """A trace with fields beside those of the schema."""
    payload = minimal_payload(trace_id=f"kp:trace:{name}", confidence=confidence, steps=RICH)
    payload["langfuse"] = {"id": name, "costs": [1, 2.5, None]}
    payload["metadata"]["quality_score"] = 0.99
    payload["metadata"]["run"] = "nightly\u2028\ud83d\ude00"
    return payload


TRACES = [trace("good", 1.0), trace("fair", 0.7), trace("poor", 0.1)]
BANDS = ("--set", "embedding.embedder=none", "--set", "scoring.threshold=0.6", "--set", "scoring.review=0.5")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return jsonl_file(tmp_path / "traces.jsonl", *TRACES, TRACES[0])


def keep(*arguments: str | Path) -> Result:
    return invoked(commands, "keep", *arguments)


def rows(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line]


@pytest.mark.parametrize(("flags", "name"), [((), "good"), (("--review",), "fair"), (("--rejected",), "poor")])
def test_originals_with_one_outcome_are_written_once_with_our_score(flags: Sequence[str], name: str, file: Path) -> None:
    kept_file = file.with_name("kept.jsonl")
    done = keep(file, "--output", kept_file, *flags, *BANDS)
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    (original,) = (each for each in TRACES if each["id"] == f"kp:trace:{name}")
    (decision,) = score_traces([original], load_settings({"embedding.embedder": "none"}))
    original = json.loads(json.dumps(original))
    original["metadata"]["quality_score"] = decision.score
    assert rows(kept_file.read_text("utf-8")) == [original]
    assert "kept 1 of 4: 2 accepted, 1 review, 1 rejected" in done.stderr


def test_several_files_and_a_document_go_to_stdout(file: Path, tmp_path: Path) -> None:
    document = tmp_path / "one.json"
    document.write_text(json.dumps([TRACES[0] | {"id": "kp:trace:other"}, {"no": "trace"}], indent=2), "utf-8")
    done = keep(file, document, *BANDS)
    assert [row["id"] for row in rows(done.stdout)] == ["kp:trace:good", "kp:trace:other"]
    assert done.exit_code == 1
    assert "1 refused" in done.stderr


def test_what_no_field_is_for_stays_as_it_was_read(tmp_path: Path) -> None:
    odd = jsonl_file(tmp_path / "odd.jsonl", TRACES[0] | {"extra": [math.nan, "\ud800", 10**300]})
    (row,) = rows(keep(odd, *BANDS).stdout)
    assert math.isnan(row["extra"][0])
    assert row["extra"][1:] == ["\ud800", 10**300]


def test_what_was_checked_is_kept_without_fields_that_no_check_has_seen(tmp_path: Path) -> None:
    odd = jsonl_file(tmp_path / "odd.jsonl", TRACES[0] | {"extra": "password"})
    (row,) = rows(keep(odd, *BANDS, "--set", "checks.secrets=note").stdout)
    assert row.keys() == TRACES[0].keys() - {"langfuse"}
    assert "run" not in row["metadata"]


def test_a_file_is_never_overwritten_by_what_is_kept_of_it(file: Path) -> None:
    before = file.read_bytes()
    for read in (file, file.parent):
        done = keep(read, "--output", file, *BANDS)
        assert (done.exit_code, file.read_bytes()) == (2, before)


def test_stored_decisions_choose_and_what_has_none_is_named(file: Path, settings: Settings, store: Store) -> None:
    policy = Policy(threshold=0.1)
    decider = Decider(store.ledger, policy, None, max_attempts=5)
    (decision,) = decider.decide([make_trace(trace_id="kp:trace:fair", confidence=0.7, steps=RICH)])
    # Another content has the id of the third.
    decider.decide([make_trace(trace_id="kp:trace:poor", objective="something else")])
    done = keep(file, "--stored", "--broker-url", settings.broker.url)
    (row,) = rows(done.stdout)
    assert (row["id"], row["metadata"]["quality_score"]) == ("kp:trace:fair", getattr(decision, "score", None))
    assert done.exit_code == 1
    assert "kept 1 of 4: 2 unknown, 1 accepted, 1 refused" in done.stderr
