"""``kp-scorer explain``, and ids that are abbreviated to their beginnings, on a ledger with a trace in every state."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from kp_scorer.cli.main import commands
from kp_scorer.decision import Nearest
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.records import Submission
from rich.cells import cell_len

from tests.support.builders import Payload, decided, make_trace, minimal_payload, store_decisions
from tests.support.commands import command, invoked, jsonl_file, run
from tests.support.traces import rows_in

DECIDED, LIKE_IT, PENDING, DEAD, DEAD_WITHOUT_RECORD = (
    f"kp:trace:{name}" for name in ("4f1c20a9-1", "4f1c20aa", "waits", "died", "norecord")
)


@pytest.fixture(autouse=True)
def _every_state(store: Store) -> None:
    """Store two decided traces with similar ids, a pending one nearest to the first, and two dead ones, one with no record."""
    waiting = minimal_payload(trace_id=PENDING, objective="pay the invoices")
    submission = json.dumps(waiting).encode()
    store.ledger.submit([Submission(PENDING, make_trace(trace_id=PENDING, objective="pay the invoices").digest(), submission)])
    first = decided(make_trace(trace_id=DECIDED))
    nearest = Nearest(trace_id=PENDING, similarity=0.5)
    novelty = first.novelty.model_copy(update={"source": "embedding", "nearest": nearest, "entry": "1-1"})
    decisions = first.model_copy(update={"novelty": novelty}), decided(make_trace(trace_id=LIKE_IT))
    store_decisions(store, {decision.trace_id: decision.model_dump_json().encode() for decision in decisions})
    for trace_id in (DEAD, DEAD_WITHOUT_RECORD):
        store.dead_letters.dead_letter(trace_id.encode(), DeadLettering("invalid", "steps: expected more", trace_id))
    store.ledger.erase(DEAD_WITHOUT_RECORD)


def row(result: Result) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def erased(trace_id: str, records: int = 0, dead_letters: int = 0) -> dict[str, Any]:
    """Return the output of `forget` for a trace that no log holds."""
    return {"trace_id": trace_id, "vectors": 0, "records": records, "dead_letters": dead_letters, "runs": 0}


def test_decision_is_explained_by_the_beginning_of_its_id(settings: Settings) -> None:
    done = run("explain", "4f1c20a9", KP_BROKER_URL=settings.broker.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{DECIDED}: rejected with 0.4925\nThat is 0.2575 short of the 0.7500 that it needs, ")
    assert "  novelty             not even 1 is enough\n" in done.stdout
    assert f"The nearest earlier trace: {PENDING}, similarity 0.5000\n  Its content is not available here" in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""


def test_traces_are_quoted_from_a_file(settings: Settings, tmp_path: Path) -> None:
    others = [minimal_payload(trace_id=f"kp:trace:{number}") for number in range(3)]
    rows = [*others, minimal_payload(trace_id=PENDING, objective="as the file has it"), minimal_payload(trace_id=DECIDED)]
    file = jsonl_file(tmp_path / "traces.jsonl", *rows)
    done = command(settings, "explain", DECIDED, "--traces", str(file))
    assert "2 of 4 types of steps 0.2500" in done.stdout
    assert "asked  count the open invoices" in done.stdout
    assert "asked  as the file has it" in done.stdout


@pytest.mark.parametrize(("beginning", "words"), [("waits", f"{PENDING}: pending since 20"), ("nope", "nope: unknown: ")])
def test_pending_and_unknown_traces_are_explained(settings: Settings, beginning: str, words: str) -> None:
    done = command(settings, "explain", beginning)
    assert done.exit_code == 1
    assert words in done.stdout


@pytest.mark.parametrize("trace_id", [DEAD, DEAD_WITHOUT_RECORD])
def test_a_dead_trace_is_explained_also_without_its_record(settings: Settings, store: Store, trace_id: str) -> None:
    (letter_id,) = [dead_letter.letter_id for dead_letter in store.dead_letters.read() if dead_letter.trace_id == trace_id]
    done = command(settings, "explain", trace_id.removeprefix("kp:trace:")[:3])
    assert done.exit_code == 1
    assert f"{trace_id}: dead, invalid: steps: expected more\n" in done.stdout
    assert f"kp-scorer dead-letter replay {letter_id}\n" in done.stdout


@pytest.mark.parametrize("asked", ["status", "explain"])
def test_an_ambiguous_beginning_is_refused_with_its_matches(settings: Settings, store: Store, asked: str) -> None:
    done = command(settings, asked, "4f1c")
    assert (done.exit_code, done.stdout) == (2, "")
    assert DECIDED in done.stderr
    assert LIKE_IT in done.stderr
    assert None not in store.ledger.look_up([DECIDED, LIKE_IT])


def test_status_accepts_beginnings_prints_full_ids_and_exits_0_if_all_are_decided(settings: Settings) -> None:
    done = command(settings, "status", "4f1c20a9")
    assert (done.exit_code, row(done)["decision"]["trace_id"]) == (0, DECIDED)
    done = command(settings, "status", "4f1c20a9", "wai", "kp:trace:wai", "nope")
    assert done.exit_code == 1
    statuses = rows_in(done.stdout)
    assert [(each["trace_id"], each["state"]) for each in statuses] == [
        (DECIDED, "decided"),
        (PENDING, "pending"),
        ("kp:trace:wai", "unknown"),
        ("nope", "unknown"),
    ]


@pytest.mark.parametrize("beginning", ["4f1c20a9", "kp:trace:4f1c20a9", "kp:trace:4f1c20a9-", "norec", "kp:trace:norec"])
def test_forget_erases_no_trace_whose_id_only_begins_so(settings: Settings, store: Store, beginning: str) -> None:
    done = command(settings, "forget", beginning)
    assert done.exit_code == 1
    assert row(done) == erased(f"kp:trace:{beginning.removeprefix('kp:trace:')}")
    assert None not in store.ledger.look_up([DECIDED, LIKE_IT, PENDING, DEAD])
    assert len(list(store.dead_letters.read())) == 2


def test_forget_erases_the_trace_of_the_exact_id_and_names_it(settings: Settings, store: Store) -> None:
    done = command(settings, "forget", "4f1c20aa")
    assert row(done) == erased(LIKE_IT, records=1)
    assert done.stderr == f"erased {LIKE_IT}\n"
    assert row(command(settings, "forget", DEAD_WITHOUT_RECORD)) == erased(DEAD_WITHOUT_RECORD, dead_letters=1)
    left = store.ledger.look_up([DECIDED, LIKE_IT, PENDING])
    assert [record and record.state for record in left] == ["decided", None, "pending"]


def test_dead_letters_are_selected_by_unique_beginnings(settings: Settings, store: Store) -> None:
    for number in range(40):
        store.dead_letters.dead_letter(b"%d" % number, DeadLettering("malformed", "body: expected JSON"))
    ids = [dead_letter.letter_id for dead_letter in store.dead_letters.read()]
    several = next(each[:1] for each in ids if sum(candidate.startswith(each[:1]) for candidate in ids) > 1)
    refused = command(settings, "dead-letter", "drop", several, "--yes")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert len(list(store.dead_letters.read())) == len(ids)
    listed = command(settings, "dead-letter", "list", "--trace-id", DEAD)
    assert row(listed)["trace_id"] == DEAD
    assert command(settings, "dead-letter", "drop", "--trace-id", "kp:trace:die", "--yes").stdout == ""
    letter_id = row(listed)["letter_id"][:12]
    assert command(settings, "dead-letter", "replay", letter_id).exit_code == 1, "it is as invalid as it was"
    assert command(settings, "dead-letter", "drop", letter_id, stdin="n\n").exit_code == 1
    assert len(list(store.dead_letters.read())) == len(ids)
    assert row(command(settings, "dead-letter", "drop", letter_id, "--yes"))["state"] == "dropped"


def test_traces_or_decisions_of_a_file_are_explained(tmp_path: Path) -> None:
    payloads: list[Payload] = [minimal_payload(trace_id=f"kp:trace:{number}") for number in "abcdefg"]
    traces = jsonl_file(tmp_path / "traces.jsonl", *payloads)
    decisions = jsonl_file(tmp_path / "decisions.jsonl", *(decided(make_trace(trace_id=each["id"])) for each in payloads))

    def explain(*arguments: str | Path) -> Result:
        return invoked(commands, "explain", *arguments, "--set", "embedding.embedder=none")

    of_traces = explain(traces, "--id", "c")
    assert of_traces.stderr.count("there is no embedder, so every novelty is 0.5") == 1
    assert "kp:trace:c: rejected with 0.4925" in of_traces.stdout
    assert "2 of 4 types of steps" in of_traces.stdout
    of_decisions = explain(decisions, "--id", "c", "--traces", traces)
    assert of_traces.stdout == of_decisions.stdout
    assert "types of steps" not in explain(decisions, "--id", "c").stdout
    assert "has more than 5 decisions: choose one with --id" in explain(decisions).stderr
    assert explain(decisions, "--id", "nope").exit_code == 1
    decisions.write_text("".join(decisions.read_text().splitlines(keepends=True)[:3]))
    assert explain(decisions).stdout.count("rejected with 0.4925") == 3
    assert explain(decisions).exit_code == 0
    with decisions.open("a") as file:
        file.write("{broken\n")
    of_some = explain(decisions)
    assert (of_some.exit_code, of_some.stdout.count("rejected with 0.4925")) == (1, 3)
