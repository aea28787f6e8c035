"""``kp-scorer explain``, and ids that are given by their beginning, on a ledger with a trace in every state."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from kp_scorer.cli.main import commands
from kp_scorer.decision import Nearest
from kp_scorer.settings import Settings
from kp_scorer.store import Identity, Store, Submission, Tally, Verdict
from rich.cells import cell_len

from tests.support.builders import Payload, decided, make_trace, minimal_payload
from tests.support.commands import run

DECIDED, LIKE_IT, PENDING, DEAD, LETTER = (f"kp:trace:{name}" for name in ("4f1c20a9-1", "4f1c20aa", "waits", "died", "letter"))


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Commands run in this process; what they log to is gone once they have ended."""
    root = logging.getLogger()
    before = root.handlers[:]
    yield
    root.handlers[:] = before


@pytest.fixture(autouse=True)
def _every_state(store: Store) -> None:
    """Two decided traces of like ids, one that is nearest to the first and pending, two dead ones, of one but the letter."""
    waiting = minimal_payload(trace_id=PENDING, objective="pay the invoices")
    submission = json.dumps(waiting).encode()
    store.ledger.open([Submission(PENDING, make_trace(trace_id=PENDING, objective="pay the invoices").digest(), submission)])
    first = decided(make_trace(trace_id=DECIDED))
    nearest = Nearest(trace_id=PENDING, similarity=0.5)
    novelty = first.novelty.model_copy(update={"source": "embedding", "nearest": nearest, "entry": "1-1"})
    for decision in (first.model_copy(update={"novelty": novelty}), decided(make_trace(trace_id=LIKE_IT))):
        store.ledger.begin([Identity(decision.trace_id, b"d" * 16)])
        store.ledger.commit(
            [Verdict(decision.trace_id, b"d" * 16, decision.model_dump_json().encode(), "", Tally("code", is_known=True))]
        )
    for trace_id in (DEAD, LETTER):
        store.dead_letters.bury(trace_id.encode(), "invalid", "steps: expected more", trace_id)
    store.ledger.erase(LETTER)


def invoke(settings: Settings, *arguments: str) -> Result:
    return CliRunner().invoke(commands, [*arguments, "--broker-url", settings.broker.url])


def row(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_decision_is_explained_by_the_beginning_of_its_id(settings: Settings) -> None:
    done = run("explain", "4f1c20a9", "--json", KP_BROKER_URL=settings.broker.url)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"{DECIDED}: rejected with 0.4925\nThat is 0.2575 short of the 0.7500 that it needs, ")
    assert "  novelty             not even 1 is enough\n" in done.stderr
    assert f"The nearest earlier trace: {PENDING}, similarity 0.5000\n  asked  pay the invoices\n" in done.stderr
    assert max(map(cell_len, done.stderr.splitlines())) <= 80
    printed = json.loads(done.stdout)
    assert (printed["trace_id"], printed["state"], printed["nearest_said"]["asked"]) == (DECIDED, "decided", "pay the invoices")
    assert [term["dimension"] for term in printed["terms"] if term["least"] is not None] == []


def test_without_json_nothing_goes_to_programs(settings: Settings) -> None:
    assert invoke(settings, "explain", LIKE_IT).stdout == ""


def test_traces_are_quoted_from_a_file(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    others = [minimal_payload(trace_id=f"kp:trace:{number}") for number in range(3)]
    rows = [*others, minimal_payload(trace_id=PENDING, objective="as the file has it"), minimal_payload(trace_id=DECIDED)]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    done = invoke(settings, "explain", DECIDED, "--traces", str(file))
    assert "2 of 4 types of steps 0.2500" in done.stderr
    assert "asked  count the open invoices" in done.stderr
    assert "asked  as the file has it" in done.stderr


def test_a_pending_trace_is_explained_by_since_when_it_waits(settings: Settings) -> None:
    done = invoke(settings, "explain", "waits", "--json")
    assert done.exit_code == 1
    assert f"{PENDING}: pending since 20" in done.stderr
    assert (row(done)["state"], row(done)["resends"]) == ("pending", 0)


@pytest.mark.parametrize("trace_id", [DEAD, LETTER])
def test_a_dead_trace_is_explained_by_what_it_died_of_also_by_its_letter_alone(
    settings: Settings, store: Store, trace_id: str
) -> None:
    (letter_id,) = [letter.letter_id for letter in store.dead_letters.read() if letter.trace_id == trace_id]
    done = invoke(settings, "explain", trace_id.removeprefix("kp:trace:")[:3], "--json")
    assert done.exit_code == 1
    assert f"{trace_id}: dead, invalid: steps: expected more\n" in done.stderr
    assert f"kp-scorer dead-letter replay {letter_id}\n" in done.stderr
    assert row(done) == {
        "trace_id": trace_id,
        "state": "dead",
        "reason": "invalid",
        "detail": "steps: expected more",
        "letter_ids": [letter_id],
    }


def test_an_unknown_trace_is_said_to_be_so(settings: Settings) -> None:
    done = invoke(settings, "explain", "nope", "--json")
    assert (done.exit_code, row(done)) == (1, {"trace_id": "nope", "state": "unknown"})
    assert "nope: unknown: " in done.stderr


@pytest.mark.parametrize("command", ["status", "explain", "forget"])
def test_what_may_be_several_is_refused_with_their_names(settings: Settings, store: Store, command: str) -> None:
    done = invoke(settings, command, "4f1c")
    assert (done.exit_code, done.stdout) == (2, "")
    assert DECIDED in done.stderr
    assert LIKE_IT in done.stderr
    assert None not in store.ledger.look_up([DECIDED, LIKE_IT])


def test_status_takes_beginnings_and_tells_whole_ids(settings: Settings) -> None:
    done = invoke(settings, "status", "4f1c20a9", "kp:trace:wai", "nope")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["trace_id"], each["state"]) for each in found] == [
        (DECIDED, "decided"),
        (PENDING, "pending"),
        ("nope", "unknown"),
    ]


def test_forget_erases_the_one_that_is_meant_and_says_which(settings: Settings, store: Store) -> None:
    done = invoke(settings, "forget", "4f1c20aa")
    assert row(done) == {"trace_id": LIKE_IT, "vectors": 0, "records": 1, "dead_letters": 0}
    assert done.stderr == f"erased {LIKE_IT}\n"
    assert row(invoke(settings, "forget", "lett")) == {"trace_id": LETTER, "vectors": 0, "records": 0, "dead_letters": 1}
    left = store.ledger.look_up([DECIDED, LIKE_IT, PENDING])
    assert [record and record.state for record in left] == ["decided", None, "pending"]


@pytest.mark.parametrize("nothing", ["", "kp:trace:"])
def test_forget_takes_nothing_for_no_id(settings: Settings, store: Store, nothing: str) -> None:
    before = store.ledger.counts()
    for letter in list(store.dead_letters.read()):
        store.dead_letters.drop(letter)
    store.dead_letters.bury(b"no trace", "malformed", "body: expected JSON")
    assert invoke(settings, "forget", nothing).exit_code == 2
    assert (len(list(store.dead_letters.read())), store.ledger.counts().pending) == (1, before.pending)


def test_dead_letters_are_chosen_by_beginnings_that_only_they_have(settings: Settings, store: Store) -> None:
    for number in range(40):
        store.dead_letters.bury(b"%d" % number, "malformed", "body: expected JSON")
    ids = [letter.letter_id for letter in store.dead_letters.read()]
    several = next(each[:1] for each in ids if sum(other.startswith(each[:1]) for other in ids) > 1)
    refused = invoke(settings, "dead-letter", "drop", several, "--yes")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert len(list(store.dead_letters.read())) == len(ids)
    shown = invoke(settings, "dead-letter", "list", "--trace-id", "died")
    assert row(shown)["trace_id"] == DEAD
    dropped = invoke(settings, "dead-letter", "drop", row(shown)["letter_id"][:12], "--yes")
    assert row(dropped)["state"] == "dropped"


def test_a_file_of_traces_or_of_decisions_is_explained(tmp_path: Path) -> None:
    payloads: list[Payload] = [minimal_payload(trace_id=f"kp:trace:{number}") for number in "abcdefg"]
    traces, decisions = tmp_path / "traces.jsonl", tmp_path / "decisions.jsonl"
    traces.write_text("".join(json.dumps(payload) + "\n" for payload in payloads))
    decisions.write_text("".join(decided(make_trace(trace_id=payload["id"])).model_dump_json() + "\n" for payload in payloads))

    def explain(*arguments: str) -> Result:
        return CliRunner().invoke(commands, ["explain", *arguments, "--set", "embedding.embedder=none"])

    of_traces = explain(str(traces), "--id", "c")
    assert of_traces.stderr.count("there is no embedder, so every novelty is 0.5") == 1
    assert "kp:trace:c: rejected with 0.4925" in of_traces.stderr
    assert "2 of 4 types of steps" in of_traces.stderr
    of_decisions = explain(str(decisions), "--id", "c", "--traces", str(traces))
    assert of_traces.stderr.endswith(of_decisions.stderr)
    assert "types of steps" not in explain(str(decisions), "--id", "c").stderr
    assert "has 7 decisions: choose one with --id" in explain(str(decisions)).stderr
    assert explain(str(decisions), "--id", "nope").exit_code == 1
    decisions.write_text("".join(decisions.read_text().splitlines(keepends=True)[:3]))
    assert explain(str(decisions)).stderr.count("rejected with 0.4925") == 3
