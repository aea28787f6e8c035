"""Commands ask no more of Redis, and hold no more in memory, when the store has grown."""

import json
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pytest
import redis
from click.testing import Result
from kp_scorer.scoring import novelty_of
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys

from tests.support.builders import candidate, decision
from tests.support.calls import traced_memory
from tests.support.commands import command
from tests.support.traces import jsonl, rows_in

KEYS: Final = Keys("kp")
RECORDS: Final = 2_000
LETTERS: Final = 2_000
SPACE: Final = "space-1"
TTL_MS: Final = 600_000


class Filled:
    """A Redis with records, dead letters and a log, and the means to run commands on it."""

    def __init__(self, settings: Settings, client: redis.Redis) -> None:
        self.settings = settings
        self.client = client
        with Store.open(settings) as store:
            store.novelty_log(SPACE).append([candidate(trace_id(number), number, dimensions=4) for number in range(50)], None)
        pipeline = client.pipeline(transaction=False)
        for number in range(RECORDS):
            stored = decision(trace_id(number), score=number / RECORDS).model_dump_json()
            key = KEYS.record(trace_id(number))
            pipeline.hset(key, mapping={"state": "decided", "digest": b"d" * 16, "decision": stored})
            pipeline.pexpire(key, TTL_MS)
        for number in range(LETTERS):
            fields: dict[Any, Any] = {"reason": "invalid", "detail": "$", "trace_id": trace_id(number), "payload": "{}"}
            fields |= dict.fromkeys(("first_ms", "last_ms", "burials", "deliveries"), 1)
            pipeline.hset(KEYS.dead_letter(letter_id(number)), mapping=fields)
            pipeline.pexpire(KEYS.dead_letter(letter_id(number)), TTL_MS)
            # More letters share a time than a command reads at once.
            pipeline.zadd(KEYS.dead_letters, {letter_id(number): 1 + number // 1_500})
        pipeline.pexpire(KEYS.dead_letters, TTL_MS)
        pipeline.execute()

    def run(self, *arguments: str, stdin: str = "") -> Result:
        return command(self.settings, *arguments, stdin=stdin)

    def calls(self, *arguments: str, stdin: str = "", code: int = 0) -> dict[str, int]:
        """Count the calls of each Redis command that a command makes, including those within scripts."""
        self.client.config_resetstat()
        done = self.run(*arguments, stdin=stdin)
        assert done.exit_code == code, done.output
        stats: Any = self.client.info("commandstats")
        return {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}


def trace_id(number: int) -> str:
    return f"kp:trace:{number:06}"


def letter_id(number: int) -> str:
    return f"{number:032x}"


@pytest.fixture
def filled(alone: tuple[Settings, redis.Redis]) -> Filled:
    return Filled(*alone)


def test_many_traces_are_erased_in_one_pass(filled: Filled) -> None:
    ids = [trace_id(number) for number in range(40)]
    calls = filled.calls(
        "forget", "-", stdin="\n".join([*ids[:20], "", *(each.removeprefix("kp:trace:") for each in ids[20:])])
    )
    # One XRANGE looks for copies of the traces, the other one for their vectors.
    assert (calls["xrange"], calls["xdel"], calls["evalsha"] + calls.get("eval", 0)) <= (2, 40, 60)
    # The command goes through the dead letters once for all ids.
    assert calls["hget"] < LETTERS + 200
    with Store.open(filled.settings) as store:
        assert store.ledger.look_up(ids) == [None] * 40
        assert store.dead_letters.count() == LETTERS - 40
        assert [len(list(log.entries())) for log in store.novelty_logs()] == [10]
    printed = filled.run("forget", "-", stdin=f"{ids[0]}\n{trace_id(50)}\n")
    rows = rows_in(printed.stdout)
    assert [(row["vectors"], row["records"], row["dead_letters"]) for row in rows] == [(0, 0, 0), (0, 1, 1)]
    assert printed.exit_code == 1


def test_dead_letters_are_read_in_pages_and_one_by_itself(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled.calls("dead-letter", "show", letter_id(1_234))["hmget"] == 1
    monkeypatch.setattr("kp_scorer.store.dead_letters._READ_AT_ONCE", 500)
    listed = [json.loads(line)["letter_id"] for line in filled.run("dead-letter", "list").stdout.splitlines()]
    assert sorted(listed) == [letter_id(number) for number in range(LETTERS)]
    assert listed[-1] == letter_id(LETTERS - 1)
    (row,) = filled.run("dead-letter", "list", "--trace-id", trace_id(7)).stdout.splitlines()
    assert json.loads(row)["letter_id"] == letter_id(7)
    assert filled.run("dead-letter", "drop", "--yes").stdout.count("dropped") == LETTERS


@pytest.mark.parametrize("asked", ["calibrate --stored --accept 20%", "report --stored --text --sample 100"])
def test_memory_does_not_grow_with_the_decisions_that_are_stored(filled: Filled, asked: str) -> None:
    filled.run(*asked.split())
    with traced_memory() as memory:
        done = filled.run(*asked.split())
    assert done.exit_code == 0, done.output
    # All decisions together take 10 MB.
    assert memory.peak_bytes < 5_000_000


def test_a_report_on_a_sample_of_stored_decisions_says_so(filled: Filled) -> None:
    report = filled.run("report", "--stored", "--text", "--sample", "100")
    assert "of 100 traces accepted" in report.stdout
    assert "a sample of 100 of 2,000 records in the ledger" in " ".join(report.stdout.split())
    assert "a sample of" not in filled.run("report", "--stored", "--text").stdout
    drawn = filled.run("calibrate", "--stored", "--accept", "20%", "--sample", "500")
    assert "a sample of 500 of 2,000 records in the ledger" in drawn.stderr
    assert "# All domains together, 500 traces: threshold" in drawn.stdout


def test_only_decisions_with_a_label_are_read_where_a_label_is_needed(filled: Filled) -> None:
    quality, calibrate = ["quality", "--stored"], ["calibrate", "--stored", "--precision", "50%"]
    labels = jsonl(*({"trace_id": trace_id(number), "good": True} for number in (3, 5, RECORDS)))
    unknown = labels.splitlines()[-1]
    for called, code in ((quality, 1), (calibrate, 2)):
        assert "hmget" not in filled.calls(*called, code=code)
        assert filled.calls(*called, "--labels", "-", stdin=unknown, code=code)["hmget"] == 1
    assert "hmget" not in filled.calls("label")
    assert filled.calls(*quality, "--labels", "-", stdin=labels, code=1)["hmget"] == 3
    filled.run("label", "--file", "-", stdin=labels)
    assert (filled.calls("label")["hmget"], filled.calls(*quality, code=1)["hmget"]) == (2, 2)
    assert filled.calls(*quality, "--sample", "100", "--labels", "-", stdin=labels, code=1).get("hmget", 0) <= 2


def test_an_audit_says_by_its_exit_code_whether_it_checked_anything_and_all_agree(filled: Filled) -> None:
    unchecked = filled.run("audit")
    assert (unchecked.exit_code, "nothing was checked" in unchecked.stderr) == (5, True), unchecked.output
    decide_as_the_log_says(filled)
    checked = filled.run("audit")
    assert (checked.exit_code, f"{SPACE}: 50 entries, 50 agree, 0 differ" in checked.stderr) == (0, True), checked.output
    _, _, last = checked.stderr.strip().rpartition(" --since ")
    with Store.open(filled.settings) as store:
        places = [entry.place for log in store.novelty_logs() for entry in log.entries()]
    assert last == str(places[-1])
    resumed = filled.run("audit", "--since", last)
    assert (resumed.exit_code, f"{SPACE}: 0 of 50 entries, 0 agree" in resumed.stderr) == (5, True), resumed.output
    newest = filled.run("audit", "--since", str(places[-4]))
    assert (newest.exit_code, f"{SPACE}: 3 of 50 entries, 3 agree" in newest.stderr) == (0, True), newest.output
    assert filled.run("audit", "--since", datetime.fromtimestamp(places[0].time_ms // 1_000, UTC).isoformat()).exit_code == 0
    # Without an offset, a time is in UTC, wherever the operator is.
    now = datetime.fromtimestamp(places[-1].time_ms // 1_000 + 1, UTC).replace(tzinfo=None)
    assert filled.run("audit", "--since", now.isoformat()).exit_code == 5
    assert filled.run("audit", "--since", "1h").exit_code == 0
    assert filled.run("audit", "--since", "yesterday").exit_code == 2
    some = filled.run("audit", "--sample", "10")
    assert (some.exit_code, f"{SPACE}: 10 of 50 entries, 10 agree" in some.stderr) == (0, True), some.output
    # The audit reports a record that somebody has altered.
    key = KEYS.record(trace_id(7))
    stored: Any = filled.client.hget(key, "decision")
    altered = json.loads(stored)
    altered["dimensions"]["novelty"] = 0.987
    filled.client.hset(key, "decision", json.dumps(altered))
    altered_since = filled.run("audit")
    (difference,) = rows_in(altered_since.stdout)
    assert altered_since.exit_code == 1
    assert (difference["trace_id"], difference["decided"]) == (trace_id(7), 0.987)


def test_an_audit_says_how_many_entries_have_left_the_log_unchecked(filled: Filled) -> None:
    decide_as_the_log_says(filled)
    with Store.open(filled.settings) as store:
        places = [entry.place for log in store.novelty_logs() for entry in log.entries()]
    filled.client.xtrim(KEYS.of_log(SPACE).log, maxlen=40, approximate=False)
    late = filled.run("audit", "--since", str(places[2]))
    assert (late.exit_code, "7 unchecked that have left the log" in late.stderr) == (5, True), late.output
    for asked, code, left in ((places[9], 0, ""), (places[8]._replace(number=0), 5, "at most 10 "), (None, 0, " 10 ")):
        trimmed = filled.run("audit", *(["--since", str(asked)] if asked else []))
        assert (trimmed.exit_code, left in trimmed.stderr) == (code, True), trimmed.output
        assert ("have left the log" in trimmed.stderr) == bool(left)


def test_an_erased_entry_leaves_all_checked_that_were_not_nearest_to_it(filled: Filled) -> None:
    nearest = decide_as_the_log_says(filled)
    assert filled.run("forget", trace_id(0)).exit_code == 0
    audited = filled.run("audit")
    lost = nearest.count(0)
    assert 0 < lost < 40
    assert audited.exit_code == 0
    assert f"{49 - lost} agree, 0 differ, 0 undecided, {lost} beyond" in audited.stderr


def decide_as_the_log_says(filled: Filled) -> list[int]:
    """Give each record the novelty of its entry; return, for each entry after the first, which entry is nearest."""
    with Store.open(filled.settings) as store:
        (log,) = store.novelty_logs()
        entries = list(log.entries())
    vectors = np.stack([entry.vector for entry in entries])
    similarities = vectors @ vectors.T
    for index, entry in enumerate(entries):
        novelty = novelty_of(float(similarities[index, :index].max()) if index else None)
        decided = decision(entry.trace_id, novelty=novelty)
        with_place = decided.novelty.model_copy(update={"space": SPACE, "entry": str(entry.place)})
        as_json = decided.model_copy(update={"novelty": with_place}).model_dump_json()
        filled.client.hset(KEYS.record(entry.trace_id), mapping={"decision": as_json, "digest": entry.digest})
    return [int(similarities[index, :index].argmax()) for index in range(1, len(entries))]
