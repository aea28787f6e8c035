"""``kp-scorer keep`` writes the original traces with one outcome and their scores, computed now or read from the ledger."""

import codecs
import fcntl
import gzip
import hashlib
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from kp_scorer import score_traces
from kp_scorer.cli.main import commands
from kp_scorer.decider import Decider
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.errors import ScorerError
from kp_scorer.limits import Limits
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.builders import Payload, make_trace, minimal_payload, steps
from tests.support.commands import invoked, jsonl_file
from tests.support.planted import SECRETS

RICH = steps("thought", "tool_call", "observation", "error_recovery")


def trace(name: str, confidence: float) -> Payload:
    """Return a trace that has fields beyond those of the schema."""
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


def test_no_threshold_is_suggested_where_a_gate_decides(file: Path) -> None:
    words = ("--set", "embedding.embedder=words")
    assert "for a share that you choose" in keep(file, *words).stderr
    assert "for a share that you choose" not in keep(file, *words, "--set", "routing.gate=coverage").stderr


def test_several_files_and_a_document_go_to_stdout(file: Path, tmp_path: Path) -> None:
    document = tmp_path / "one.json"
    document.write_text(json.dumps([TRACES[0] | {"id": "kp:trace:other"}, {"no": "trace"}], indent=2), "utf-8")
    done = keep(file, document, *BANDS)
    assert [row["id"] for row in rows(done.stdout)] == ["kp:trace:good", "kp:trace:other"]
    assert done.exit_code == 1
    assert "1 refused" in done.stderr


def test_unknown_fields_stay_as_they_were_read(tmp_path: Path) -> None:
    odd = jsonl_file(tmp_path / "odd.jsonl", TRACES[0] | {"extra": [math.nan, "\ud800", 10**300]})
    (row,) = rows(keep(odd, *BANDS).stdout)
    assert math.isnan(row["extra"][0])
    assert row["extra"][1:] == ["\ud800", 10**300]


def test_checked_traces_are_kept_without_fields_that_no_check_has_seen(tmp_path: Path) -> None:
    odd = jsonl_file(tmp_path / "odd.jsonl", TRACES[0] | {"extra": "password"})
    (row,) = rows(keep(odd, *BANDS, "--set", "checks.secrets=note").stdout)
    assert row.keys() == TRACES[0].keys() - {"langfuse"}
    assert "run" not in row["metadata"]


def test_keeping_traces_never_overwrites_the_file_that_they_come_from(file: Path) -> None:
    before = file.read_bytes()
    for read in (file, file.parent):
        done = keep(read, "--output", file, *BANDS)
        assert (done.exit_code, file.read_bytes()) == (2, before)


@pytest.mark.parametrize("options", ["x.manifest.json", "{file} --against x.md", "{file} --best 1 --why x.md"])
def test_manifest_and_card_overwrite_no_file_of_an_option(options: str, file: Path, tmp_path: Path) -> None:
    names = "x.manifest.json", "x.md"
    for name in names:
        (tmp_path / name).write_text("Refund the bicycle.\n")
    arguments = [str(tmp_path / each) if each in names else each.format(file=file) for each in options.split()]
    done = keep(*arguments, "--as", "messages", "--output", tmp_path / "x.jsonl", *BANDS)
    assert (done.exit_code, {(tmp_path / name).read_text() for name in names}) == (2, {"Refund the bicycle.\n"}), done.output


def test_stored_decisions_choose_and_what_has_none_is_named(file: Path, settings: Settings, store: Store) -> None:
    policy = Policy(threshold=0.1)
    decider = Decider(store.ledger, policy, None, max_attempts=5)
    (decision,) = decider.decide([make_trace(trace_id="kp:trace:fair", confidence=0.7, steps=RICH)])
    # The ledger has other content under the id of the third trace.
    decider.decide([make_trace(trace_id="kp:trace:poor", objective="something else")])
    done = keep(file, "--stored", "--broker-url", settings.broker.url)
    (row,) = rows(done.stdout)
    assert (row["id"], row["metadata"]["quality_score"]) == ("kp:trace:fair", getattr(decision, "score", None))
    assert done.exit_code == 1
    assert "kept 1 of 4: 2 unknown, 1 accepted, 1 refused" in done.stderr


@pytest.fixture
def fleet(settings: Settings, store: Store) -> tuple[str, ...]:
    """The flags for a store in which a fleet with the embedder of words has decided the runs of ``ASKED``."""
    embedder, window = WordsEmbedder(), settings.novelty.window()
    meter = NoveltyMeter(embedder, store.novelty_log(embedder.space), window)
    Decider(store.ledger, Policy(), meter, max_attempts=5).decide([decode_trace(each, Limits()) for each in ASKED])
    return "--stored", "--broker-url", settings.broker.url


def test_a_set_is_chosen_among_the_traces_that_a_fleet_has_decided(asked: Path, fleet: tuple[str, ...], tmp_path: Path) -> None:
    done = keep("--best", "1", *fleet)
    assert done.exit_code == 0, done.output
    (row,) = rows(done.stdout)
    assert (row["trace_id"], row["stands_for"], row["kept"]) == ("kp:trace:refund", 5, True)
    # With the files, which hold the texts that Redis lacks, the same trace is chosen.
    assert rows(keep(asked, "--best", "1", *fleet).stdout) == [ASKED[4]]
    assert rows(keep("--best", "100%", "--since", "1h", *fleet).stdout) == rows(keep("--best", "100%", *fleet).stdout)
    assert "kept 0 of 0 traces" in keep("--best", "1", "--since", "2999-01-01", *fleet).stderr
    none = jsonl_file(tmp_path / "none.jsonl", {"no": "trace"})
    done = keep(none, "--best", "1", *fleet)
    assert (done.exit_code, "1 of the kept traces are not in the files" in done.stderr) == (1, True)


def test_a_trace_of_other_content_than_was_decided_is_not_written(fleet: tuple[str, ...], tmp_path: Path) -> None:
    longer = ASKED[4] | {"steps": steps("thought", "tool_call", "observation", "thought")}
    done = keep(jsonl_file(tmp_path / "longer.jsonl", longer, ASKED[4]), "--best", "1", *fleet)
    assert (done.exit_code, rows(done.stdout)) == (1, [ASKED[4]]), done.output
    assert "line 1: id: kp:trace:refund was submitted before with other content" in done.stderr


def test_labels_say_what_succeeded(fleet: tuple[str, ...], store: Store) -> None:
    assert store.ledger.label({"kp:trace:refund": False, "kp:trace:copy": False, "kp:trace:ops-1": True}) == {}
    chosen_ids = [row["trace_id"] for row in rows(keep("--best", "100%", *fleet).stdout)]
    assert chosen_ids == ["kp:trace:lone", "kp:trace:ops-1"]


def test_a_success_of_little_confidence_is_still_a_success(fleet: tuple[str, ...], settings: Settings, store: Store) -> None:
    meter = NoveltyMeter(WordsEmbedder(), store.novelty_log(WordsEmbedder().space), settings.novelty.window())
    unsure = make_trace(trace_id="kp:trace:unsure", objective="Count the herons", confidence=0.2, domain="birds")
    Decider(store.ledger, Policy(), meter, max_attempts=5).decide([unsure])
    assert "kp:trace:unsure" in [row["trace_id"] for row in rows(keep("--best", "100%", *fleet).stdout)]


def test_each_night_adds_the_traces_that_add_to_earlier_nights(fleet: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    keep("--best", "1", "--into", folder, *fleet)
    keep("--best", "100%", "--into", folder, *fleet)
    done = keep("--best", "100%", "--into", folder, *fleet)
    nights = [[row["trace_id"] for row in rows(path.read_text("utf-8"))] for path in sorted(folder.iterdir())]
    assert nights == [["kp:trace:refund"], ["kp:trace:lone"], []], done.output
    (folder / "kept-0004.jsonl").write_text("{}\n")
    done = keep("--best", "1", "--into", folder, *fleet)
    assert (done.exit_code, "kept-0004.jsonl, line 1: expected an id" in done.stderr) == (2, True)


def test_traces_of_earlier_nights_stand_for_their_tasks_once_their_vectors_have_left_the_log(
    fleet: tuple[str, ...], tmp_path: Path, settings: Settings, store: Store
) -> None:
    folder, log = tmp_path / "kept", store.novelty_log(WordsEmbedder().space)
    keep("--best", "100%", "--into", folder, *fleet)
    log.clear()
    meter = NoveltyMeter(WordsEmbedder(), log, settings.novelty.window())
    next_day = [run("again", "Refund the order of the blue bicycle"), run("herons", "Count the herons at the river mouth")]
    Decider(store.ledger, Policy(), meter, max_attempts=5).decide([decode_trace(each, Limits()) for each in next_day])
    done = keep("--best", "100%", "--into", folder, *fleet)
    (row,) = rows((folder / "kept-0002.jsonl").read_text("utf-8"))
    assert row["trace_id"] == "kp:trace:herons", done.stderr
    # Vectors of another embedder cannot be used.
    of_another = (folder / "kept-0001.jsonl").read_text("utf-8").replace(WordsEmbedder().space, "another")
    (folder / "kept-0001.jsonl").write_text(of_another, "utf-8")
    done = keep("--best", "100%", "--into", folder, *fleet)
    assert "2 runs that were kept earlier have no vector of this embedder, and stand for no others" in done.stderr
    (row,) = rows((folder / "kept-0003.jsonl").read_text("utf-8"))
    assert row["trace_id"] == "kp:trace:again"


def test_kept_traces_that_turn_out_to_have_failed_no_longer_stand_for_others(
    fleet: tuple[str, ...], tmp_path: Path, store: Store
) -> None:
    folder = tmp_path / "kept"
    keep("--best", "1", "--into", folder, *fleet)
    assert store.ledger.label({"kp:trace:refund": False}) == {}
    keep("--best", "1", "--into", folder, *fleet)
    assert [row["trace_id"] for row in rows((folder / "kept-0002.jsonl").read_text("utf-8"))] == ["kp:trace:copy"]


def run(name: str, objective: str, *, success: bool = True, domain: str = "qa") -> Payload:
    return minimal_payload(trace_id=f"kp:trace:{name}", objective=objective, success=success, domain=domain)


ASKED = [
    run("lone", "Translate the letter of the mayor into Danish"),
    *(run(f"failed-{number}", "Refund the order of the blue bicycle", success=False) for number in range(3)),
    run("refund", "Refund the order of the blue bicycle"),
    run("copy", "Refund the order of the blue bicycle"),
    *(run(f"ops-{number}", f"Restart server {number}", success=False, domain="ops") for number in range(2)),
]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    return jsonl_file(tmp_path / "asked.jsonl", *ASKED, ASKED[0])


def test_best_keeps_the_success_that_covers_the_most_frequent_tasks(asked: Path) -> None:
    done = keep(asked, "--best", "1")
    assert done.exit_code == 0, done.output
    assert rows(done.stdout) == [ASKED[4]]
    assert "kept 1 of 8 traces\n1 have the id of an earlier trace, and are left out\n" in done.stderr


def test_best_leaves_out_copies_and_failures_even_where_there_is_room(asked: Path) -> None:
    done = keep(asked, "--best", "100%")
    assert rows(done.stdout) == [ASKED[0], ASKED[4]]
    assert (
        "1 of the domains had room for every success, so nothing was chosen there, and only copies are left out: qa\n"
        in done.stderr
    )
    assert "nothing was chosen" not in keep(asked, "--best", "1").stderr


def test_only_the_largest_of_many_domains_are_shown(tmp_path: Path) -> None:
    alone = (run(f"alone-{number}", "Count the herons", domain=f"d{number}") for number in range(60))
    done = keep(jsonl_file(tmp_path / "many.jsonl", *alone, *ASKED), "--best", "100%")
    assert " qa " in done.stderr
    assert "and 12 smaller domains\n" in done.stderr
    assert "61 of the domains had room" in done.stderr
    assert done.stderr.endswith("only copies are left out: d0, d1, d2 and 58 more\n")


def test_why_names_for_every_trace_the_kept_one_that_stands_for_it(asked: Path, tmp_path: Path) -> None:
    why = tmp_path / "why.jsonl"
    keep(asked, "--best", "100%", "--why", why)
    verdicts = {row.pop("trace_id").removeprefix("kp:trace:"): row for row in rows(why.read_text("utf-8"))}
    assert verdicts.keys() == {trace["id"].removeprefix("kp:trace:") for trace in ASKED}
    refund, copied = verdicts["refund"], verdicts["copy"]
    assert (refund["kept"], refund["stands_for"], refund["similarity"]) == (True, 4, 1.0)
    assert (copied["kept"], copied["eligible"], copied["nearest"]) == (False, True, "kp:trace:refund")
    assert (verdicts["ops-0"]["kept"], verdicts["ops-0"]["nearest"]) == (False, None)


def test_best_leaves_out_what_a_check_would_keep_back(tmp_path: Path) -> None:
    secret = run("secret", f"List the issues with {SECRETS['GitHub token'](random.Random(1))}")
    both = jsonl_file(tmp_path / "both.jsonl", secret, ASKED[0] | {"extra": 1})
    done = keep(both, "--best", "2", "--set", "checks.secrets=reject")
    assert [row["id"] for row in rows(done.stdout)] == [ASKED[0]["id"]], done.output
    assert "extra" not in rows(done.stdout)[0]


@pytest.mark.parametrize("best", ["0", "-1", "101%", "0%", "1.5", "nan%", "some"])
def test_best_refuses_values_that_are_neither_shares_nor_numbers(asked: Path, best: str) -> None:
    done = keep(asked, "--best", best)
    assert done.exit_code == 2
    assert "expected a share of all traces, such as 10%, or a number of them" in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        *("--best=1 --rejected", "--best=1 --review", "--best=1 --since=1d", "--best=1 --stored --rank=score"),
        *("--best=1 --into=set --rank=score", "--best=1 --into=set --output=o", "--best=1 --why=a --output=./a"),
        *("--as=pairs --output=x.jsonl", "--best=1 --as=messages", "--best=1 --as=source --into=x"),
        *("--best=1 --secrets=drop", "--secrets=replace --as=source", "--best=1 --licence=mit"),
    ],
)
def test_options_that_do_not_go_together_are_refused(asked: Path, flags: str) -> None:
    assert keep(asked, *flags.split()).exit_code == 2


def test_files_are_needed_unless_a_set_is_chosen_of_what_is_stored() -> None:
    done = keep("--stored")
    assert (done.exit_code, "expected FILE" in done.stderr) == (2, True)


def test_rank_score_keeps_the_highest_scores_whether_they_cover_anything_or_not(file: Path, tmp_path: Path) -> None:
    why = tmp_path / "why.jsonl"
    done = keep(file, "--best", "2", "--rank", "score", "--why", why, *BANDS)
    assert [row["id"] for row in rows(done.stdout)] == ["kp:trace:good", "kp:trace:fair"], done.output
    assert [row["nearest"] for row in rows(why.read_text("utf-8"))] == ["kp:trace:poor", None, "kp:trace:good"]


def test_a_thousand_runs_are_chosen_in_batches_as_well_as_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [f"Task {task}: {' '.join(f'word{task * 7 + word}' for word in range(7))}" for task in range(50)]
    many = jsonl_file(tmp_path / "many.jsonl", *(run(f"{number}", tasks[number % 50]) for number in range(1_000)))
    at_once = rows(keep(many, "--best", "50").stdout)
    monkeypatch.setattr("kp_scorer.cli.keeping.BATCH", 100)
    in_batches = rows(keep(many, "--best", "50").stdout)
    assert {row["task"]["objective"] for row in at_once} == set(tasks)
    assert len({row["task"]["objective"] for row in in_batches}) >= 40


def test_into_adds_only_traces_that_add_to_those_in_the_folder(asked: Path, tmp_path: Path) -> None:
    folder, why = tmp_path / "set", tmp_path / "why.jsonl"
    assert keep(asked, "--best", "100%", "--into", folder).exit_code == 0
    first = (folder / "kept-0001.jsonl").read_bytes()
    later = jsonl_file(
        tmp_path / "later.jsonl",
        ASKED[4],
        run("again", "Refund the order of the blue bicycle"),
        run("new", "Count the herons at the river mouth"),
    )
    done = keep(later, "--best", "100%", "--into", folder, "--why", why)
    assert [row["id"] for row in rows((folder / "kept-0002.jsonl").read_text("utf-8"))] == ["kp:trace:new"], done.output
    assert (folder / "kept-0001.jsonl").read_bytes() == first
    assert [(row["trace_id"], row["kept"], row["nearest"]) for row in rows(why.read_text("utf-8"))] == [
        ("kp:trace:new", True, None),
        ("kp:trace:again", False, "kp:trace:refund"),
    ]
    # The third time, nothing is new.
    assert "kept 0 of 1 traces" in keep(later, "--best", "100%", "--into", folder).stderr


def test_into_is_refused_while_another_command_adds_to_the_folder(asked: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    done = keep(asked, "--best", "1", "--into", folder)
    assert (done.exit_code, "another command adds to it" in done.stderr) == (2, True), done.output
    os.close(descriptor)
    assert keep(asked, "--best", "1", "--into", folder).exit_code == 0


def test_an_added_file_gets_its_name_once_it_is_complete(asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> Iterator[Any]:
        yield ASKED[0]
        assert [path.name for path in folder.iterdir()] == ["kept-0001.jsonl.partial"]
        raise ScorerError("the disk is gone")

    folder = tmp_path / "set"
    with monkeypatch.context() as patched:
        patched.setattr("kp_scorer.cli.kept_rows.rows_of_set", failing)
        assert keep(asked, "--best", "100%", "--into", folder).exit_code == 1
    done = keep(asked, "--best", "100%", "--into", folder)
    assert [path.name for path in folder.iterdir()] == ["kept-0001.jsonl"], done.output
    assert len(rows((folder / "kept-0001.jsonl").read_text("utf-8"))) == 2


def test_files_of_earlier_nights_still_count_once_they_are_compressed(
    asked: Path, fleet: tuple[str, ...], tmp_path: Path
) -> None:
    sources: list[tuple[str | Path, ...]] = [(asked,), fleet]
    for number, flags in enumerate(sources):
        folder = tmp_path / f"set-{number}"
        for _ in range(2):
            done = keep(*flags, "--best", "100%", "--into", folder)
            assert done.exit_code == 0, done.output
            first = folder / "kept-0001.jsonl"
            if first.exists():
                (folder / "kept-0001.jsonl.gz").write_bytes(gzip.compress(first.read_bytes()))
                first.unlink()
        assert (folder / "kept-0002.jsonl").read_bytes() == b""
        assert sorted(path.name for path in folder.iterdir()) == ["kept-0001.jsonl.gz", "kept-0002.jsonl"]


def test_there_is_a_file_after_the_ten_thousandth(asked: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("9999", "10000", "notes"):
        (folder / f"kept-{name}.jsonl").touch()
    assert keep(asked, "--best", "1", "--into", folder).exit_code == 0
    assert len(rows((folder / "kept-10001.jsonl").read_text("utf-8"))) == 1


def test_into_names_the_line_that_is_no_trace(asked: Path, tmp_path: Path) -> None:
    jsonl_file(tmp_path / "kept-0007.jsonl", ASKED[0], {"no": "trace"})
    done = keep(asked, "--best", "1", "--into", tmp_path / ".")
    assert done.exit_code == 2
    other = tmp_path / "set"
    other.mkdir()
    (tmp_path / "kept-0007.jsonl").rename(other / "kept-0007.jsonl")
    done = keep(asked, "--best", "1", "--into", other)
    assert (done.exit_code, [path.name for path in other.iterdir()]) == (2, ["kept-0007.jsonl"])
    assert "kept-0007.jsonl, line 2" in done.stderr


def chats(*named: tuple[str, str, bool]) -> list[Payload]:
    """Return chats with a system text and a tool, each with a field that says whether it succeeded."""
    call = {"id": "a", "type": "function", "function": {"name": "refund", "arguments": '{"order": 7, "note": null}'}}
    return [
        {
            "id": name,
            "success": success,
            "tools": [{"type": "function", "function": {"name": "refund"}}],
            "messages": [
                {"role": "system", "content": "You are a clerk."},
                {"role": "user", "content": objective},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": f"done for {name}@example.org"},
                {"role": "assistant", "content": f"Refunded by {name}."},
            ],
        }
        for name, objective, success in named
    ]


CHATS = chats(
    ("ann", "Refund the order of the blue bicycle", False),
    ("ben", "Refund the order of the blue bicycle", True),
    ("cas", "Translate the letter of the mayor into Danish", True),
    ("dan", "Count the herons at the river mouth", True),
)
CONVERTING = (
    *("--confidence", "0.9", "--domain", "qa", "--created-at", "2026-01-01T00:00:00Z"),
    *("--success-field", "success", "--id-field", "id"),
)


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    return jsonl_file(tmp_path / "chats.jsonl", *CHATS)


def test_messages_are_the_chats_as_they_were_without_what_leads_to_people(chats_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "train.jsonl"
    done = keep(chats_file, "--best", "100%", "--as", "messages", "--output", output, "--licence", "cc-by-4.0", *CONVERTING)
    assert done.exit_code == 0, done.output
    first, *others = rows(output.read_text("utf-8"))
    assert len(others) == 2
    system, user, called, result, answer = first["messages"]
    assert [system["content"], user["content"], answer["content"]] == [
        "You are a clerk.",
        "Refund the order of the blue bicycle",
        "Refunded by ben.",
    ]
    assert called["tool_calls"][0]["function"] == {"name": "refund", "arguments": '{"order": 7, "note": null}'}
    assert result == {"role": "tool", "tool_call_id": "a", "name": "refund", "content": "done for [EMAIL_1]"}
    parameters = {"type": "object", "properties": {}}
    definition = {"name": "refund", "description": "", "parameters": parameters}
    assert json.loads(first["tools"]) == [{"type": "function", "function": definition}]
    assert (first["task"], first["domain"], first["success"], first["score"]) == (user["content"], "qa", True, None)
    assert (first["stands_for"], first["file"], first["line"]) == (1, str(chats_file), 2)
    manifest = json.loads((tmp_path / "train.manifest.json").read_text("utf-8"))
    assert (manifest["rows"], manifest["succeeded"], manifest["tasks"], manifest["replaced"]) == (3, 3, 3, {"email": 3})
    assert manifest["sha256"] == hashlib.sha256(output.read_bytes()).hexdigest()
    assert manifest["sources"] == [{"file": str(chats_file), "sha256": hashlib.sha256(chats_file.read_bytes()).hexdigest()}]
    card = (tmp_path / "train.md").read_text("utf-8")
    assert "license: cc-by-4.0" in card
    assert "- email: 3" in card


def test_the_manifest_says_by_which_options_and_settings_the_runs_were_chosen(chats_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "train.jsonl"
    flags = ("--rejected", "--broker-url", "redis://:secret@127.0.0.1:1/0", "--set", "scoring.threshold=0.99", *BANDS[:2])
    done = keep(chats_file, "--as", "messages", "--output", output, *flags, *CONVERTING)
    how = json.loads((tmp_path / "train.manifest.json").read_text("utf-8"))["how"]
    assert (how["outcome"], how["scoring.threshold"], how["success_field"]) == ("rejected", 0.99, "success"), done.output
    assert "rank" not in how
    assert "secret" not in str(how)
    assert "- scoring.threshold: 0.99\n" in (tmp_path / "train.md").read_text("utf-8")
    keep(chats_file, "--best", "1", "--as", "messages", "--output", output, "--success", "--domain", "eve@example.org")
    manifest = json.loads((tmp_path / "train.manifest.json").read_text("utf-8"))
    how = manifest["how"]
    assert (how["best"], how["rank"], how["success"], how["task_domain"]) == ("1", "coverage", True, "[EMAIL_2]")
    assert "eve@" not in str(manifest)
    for best in ("12345", "100%", "2.5%"):
        keep(chats_file, "--best", best, "--as", "messages", "--output", output, *CONVERTING)
        assert json.loads((tmp_path / "train.manifest.json").read_text("utf-8"))["how"]["best"] == best


def test_rows_name_the_only_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    file = jsonl_file(tmp_path / "runs" / "chats.jsonl", *CHATS)
    keep(file.parent, "--best", "100%", "--as", "messages", "--output", tmp_path / "train.jsonl", *CONVERTING)
    manifest = json.loads((tmp_path / "train.manifest.json").read_text("utf-8"))
    assert manifest["sources"] == [{"file": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}]


@pytest.mark.parametrize(("shape", "column"), [("messages", "messages"), ("pairs", "rejected")])
def test_parquet_has_the_rows_of_json_lines(shape: str, column: str, chats_file: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="install kp-scorer[parquet]")
    for form in ("jsonl", "parquet"):
        done = keep(chats_file, "--best", "100%", "--as", shape, "--output", tmp_path / f"train.{form}", *CONVERTING)
        assert done.exit_code == 0, done.output
    read_rows = parquet.read_table(tmp_path / "train.parquet").to_pylist()
    for row, expected in zip(read_rows, rows((tmp_path / "train.jsonl").read_text("utf-8")), strict=True):
        # Parquet returns absent fields as nulls.
        assert [{k: v for k, v in each.items() if v is not None} for each in row.pop(column)] == expected.pop(column)
        assert {name: row[name] for name in row if name != "chosen"} == {
            name: expected[name] for name in row if name != "chosen"
        }
    assert sorted(path.suffix for path in tmp_path.glob("train*")) == [".json", ".jsonl", ".md", ".parquet"]
    keep(chats_file, "--best", "100%", "--as", shape, "--output", tmp_path / "again.parquet", *CONVERTING)
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "train.parquet").read_bytes()


@pytest.mark.parametrize("secrets", ["replace", "keep"])
def test_half_a_character_is_replaced_in_rows_for_trainers(secrets: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="install kp-scorer[parquet]")
    (chat,) = chats(("cut \ud83d", "Refund the order \ud83d", True))
    chat["messages"][2]["tool_calls"][0]["function"]["arguments"] = r'{"note": "\ud83d", "to": "eve@example.org"}'
    file = jsonl_file(tmp_path / os.fsdecode(b"chats\xff.jsonl"), chat)
    for form in ("jsonl", "parquet"):
        output = ("--secrets", secrets, "--output", tmp_path / f"train.{form}")
        done = keep(file, "--best", "1", "--as", "messages", *output, *CONVERTING)
        assert done.exit_code == 0, done.output
    (row,) = rows((tmp_path / "train.jsonl").read_text("utf-8"))
    assert row["messages"][1]["content"] == "Refund the order \ufffd"
    assert str(row).encode()
    assert parquet.read_table(tmp_path / "train.parquet").to_pylist()[0]["messages"][1]["content"] == "Refund the order \ufffd"


def test_the_same_inputs_give_the_same_bytes(chats_file: Path, tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        keep(chats_file, "--best", "2", "--as", "messages", "--output", tmp_path / "train.jsonl", *CONVERTING)
        contents.append([(tmp_path / f"train.{ending}").read_bytes() for ending in ("jsonl", "manifest.json", "md")])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("rank", [(), ("--rank", "score", *BANDS[:2])])
def test_pairs_are_a_kept_success_and_a_failure_of_its_task(rank: Sequence[str], chats_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "pairs.jsonl"
    done = keep(chats_file, "--best", "100%", "--as", "pairs", "--output", output, *CONVERTING, *rank)
    (pair,) = rows(output.read_text("utf-8"))
    assert [pair[side][-1]["content"] for side in ("chosen", "rejected")] == ["Refunded by ben.", "Refunded by ann."], (
        done.output
    )
    assert (pair["trace_id"][-3:], pair["rejected_id"][-3:], pair["line"]) == ("ben", "ann", 2)


def test_no_pair_has_one_chat_twice(chats_file: Path, tmp_path: Path) -> None:
    # The second failure says what the success says, as where a test sometimes fails without a reason.
    copy = CHATS[1] | {"id": "eli", "success": False}
    jsonl_file(chats_file, CHATS[1], copy, CHATS[2], CHATS[2] | {"id": "fay", "success": False}, CHATS[0])
    output = tmp_path / "pairs.jsonl"
    done = keep(chats_file, "--best", "100%", "--as", "pairs", "--output", output, *CONVERTING)
    pairs = rows(output.read_text("utf-8"))
    assert [(pair["trace_id"][-3:], pair["rejected_id"][-3:]) for pair in pairs] == [("ben", "ann")], done.output


def test_source_is_the_record_as_it_came_with_its_score_and_decision(chats_file: Path) -> None:
    done = keep(chats_file, "--as", "source", *CONVERTING, *BANDS[:2], "--set", "scoring.threshold=0.1")
    kept_rows = rows(done.stdout)
    assert [row["source"] for row in kept_rows] == CHATS, done.output
    assert [(row["file"], row["line"], row["decision"]["score"]) for row in kept_rows] == [
        (str(chats_file), number, row["score"]) for number, row in enumerate(kept_rows, 1)
    ]


def test_a_report_reads_kept_runs_of_any_length(chats_file: Path, tmp_path: Path) -> None:
    long = CHATS[1] | {"messages": [*CHATS[1]["messages"], {"role": "assistant", "content": "so " * 400_000}]}
    jsonl_file(chats_file, CHATS[0], long, *CHATS[2:])
    kept_file, traces = tmp_path / "kept.jsonl", tmp_path / "traces.jsonl"
    keep(chats_file, "--best", "100%", "--as", "source", "--output", kept_file, *CONVERTING)
    traces.write_text(invoked(commands, "convert", chats_file, *CONVERTING).stdout, "utf-8")
    output = ("--output", tmp_path / "report.html", "--set", "embedding.embedder=words")
    done = invoked(commands, "report", traces, "--kept", kept_file, *output)
    assert done.exit_code == 0, done.output


def test_tasks_are_counted_and_capped(tmp_path: Path) -> None:
    asked = [run(f"a{n}", f"Restart server {n} in hall {n * 7}") for n in range(4)] + [run("b0", "Sum up the invoices")]
    asked += [run("c0", "Sell the boat", success=False), run("c1", "Mail the crew"), run("c2", "Mail the crew", success=False)]
    for each in asked[:4]:
        each["metadata"]["task"] = "restart"
    file = jsonl_file(tmp_path / "asked.jsonl", *asked)
    done = keep(file, "--best", "100%")
    cells = done.stderr.split("qa")[1].split()[:8]
    # The cells are runs, eligible, kept and near copies; then, of 4 tasks, 2 are always solved, 1 is never, and 3 are covered.
    assert cells == ["8", "6", "6", "0", "4", "2", "1", "3"], done.output
    for rank in ("coverage", "score"):
        flags = ("--most-by-task", "1", "--rank", rank, "--set", "embedding.embedder=words")
        names = [row["id"].removeprefix("kp:trace:") for row in rows(keep(file, "--best", "100%", *flags).stdout)]
        assert sum(name.startswith("a") for name in names) == 1
    assert keep(file, "--most-by-task", "1").exit_code == 2


def test_why_points_to_the_file_and_the_line_of_each_run(chats_file: Path, tmp_path: Path) -> None:
    why = tmp_path / "why.jsonl"
    keep(chats_file, "--best", "1", "--why", why, *CONVERTING)
    assert sorted((row["file"], row["line"]) for row in rows(why.read_text("utf-8"))) == [
        (str(chats_file), n) for n in range(1, 5)
    ]


def test_secrets_are_dropped_or_kept_on_demand(chats_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "train.jsonl"
    done = keep(chats_file, "--best", "100%", "--as", "messages", "--secrets", "drop", "--output", output, *CONVERTING)
    assert (output.read_text("utf-8"), "3 dropped, as they hold something secret: " in done.stderr) == ("", True)
    keep(chats_file, "--best", "100%", "--as", "messages", "--secrets", "keep", "--output", output, *CONVERTING)
    assert output.read_text("utf-8").count("@example.org") == 3


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_run_in_which_a_second_search_finds_something_is_left_out_and_named(
    form: str, chats_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="install kp-scorer[parquet]")
    monkeypatch.setattr("kp_scorer.checks.redaction.is_clean", lambda row: "cas" not in row["trace_id"])
    output = tmp_path / f"train.{form}"
    done = keep(chats_file, "--best", "100%", "--as", "messages", "--output", output, *CONVERTING)
    assert (done.exit_code, "1 dropped, as they hold something secret: kp:trace:openai:cas" in done.stderr) == (0, True)
    kept_rows = parquet.read_table(output).to_pylist() if form == "parquet" else rows(output.read_text("utf-8"))
    assert [row["trace_id"][-3:] for row in kept_rows] == ["ben", "dan"]
    manifest = json.loads((tmp_path / "train.manifest.json").read_text("utf-8"))
    assert (manifest["rows"], manifest["dropped"]) == (2, 1)


HERONS = b"Count the herons at the river mouth!"


def test_tasks_of_a_benchmark_are_left_out_and_named(chats_file: Path, tmp_path: Path) -> None:
    benchmark = tmp_path / "benchmark.jsonl"
    benchmark.write_text('{"question": "Count the herons at the river mouth!"}\nRefund the order of the blue bicycle\n')
    output = tmp_path / "train.jsonl"
    done = keep(chats_file, "--best", "100%", "--as", "messages", "--against", benchmark, "--output", output, *CONVERTING)
    assert [row["trace_id"][-3:] for row in rows(output.read_text("utf-8"))] == ["cas"], done.output
    assert "3 left out, as their tasks are in the file of --against: " in done.stderr
    left_out = json.loads((tmp_path / "train.manifest.json").read_text("utf-8"))["left_out"]
    assert [(row["trace_id"][-3:], row["line"]) for row in left_out] == [("ann", 2), ("ben", 2), ("dan", 1)]
    benchmark.write_text('{"id": 1}\n')
    done = keep(chats_file, "--best", "1", "--against", benchmark, *CONVERTING)
    assert (done.exit_code, "line 1: expected a text, or an object with" in done.stderr) == (2, True)
    # A variable that is not set must not let the benchmark in.
    assert keep(chats_file, "--best", "1", "--against", "", *CONVERTING).exit_code == 2


def test_a_benchmark_is_refused_where_there_are_no_tasks(fleet: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "benchmark").write_bytes(HERONS)
    done = keep("--best", "1", "--stored", "--against", tmp_path / "benchmark", *fleet)
    assert (done.exit_code, "--against is for FILE" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("content", "left_out", "problem"),
    [
        (gzip.compress(HERONS, mtime=0), 1, ""),
        (codecs.BOM_UTF8 + json.dumps({"question": HERONS.decode()}).encode(), 1, ""),
        (HERONS.decode().encode("utf-16"), 0, "line 1: expected text in UTF-8"),
        (HERONS.decode().encode("utf-16-le"), 0, "line 1: expected text in UTF-8"),
        ("Tæl hejrerne\nZähle die Reiher".encode("latin-1"), 0, "line 1: expected text in UTF-8"),
        (codecs.BOM_UTF8 + b"\n\n", 0, "got an empty file"),
    ],
    ids=["gzip", "mark", "UTF-16", "UTF-16 without a mark", "Latin-1", "empty"],
)
def test_a_benchmark_that_cannot_be_read_is_refused(
    content: bytes, left_out: int, problem: str, chats_file: Path, tmp_path: Path
) -> None:
    benchmark = tmp_path / "benchmark"
    benchmark.write_bytes(content)
    done = keep(chats_file, "--best", "100%", "--against", benchmark, *CONVERTING)
    assert done.exit_code == 2 * bool(problem)
    assert problem in done.stderr
    assert done.stderr.count("left out, as their tasks are in the file of --against") == left_out
