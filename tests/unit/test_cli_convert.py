"""``kp-scorer convert`` reads what other tools recorded, writes traces, and demands the options that it needs."""

import gzip
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result
from kp_scorer.cli.converting import Conversion
from kp_scorer.cli.input import read_traces
from kp_scorer.cli.main import commands
from kp_scorer.errors import InvalidTrace

from tests.support.builders import LIMITS, minimal_payload
from tests.support.commands import invoked, json_lines
from tests.support.converting import SUPPLIED, converted
from tests.support.documents import blocks
from tests.unit import test_adapter_agents, test_adapter_langfuse, test_adapter_otel
from tests.unit.test_adapter_openai import assistant, call, result, user

OPTIONS: Final = {
    "--confidence": "0.75",
    "--domain": "customer_service",
    "--visibility": "private",
    "--privacy-level": "federated",
    "--created-at": "2026-01-31T12:00:00Z",
}
CHAT: Final = {"messages": [user("Any mail?"), assistant("Two messages.")]}


def run(content: bytes, *flags: str, file: str = "-", **changed: str | None) -> Result:
    options = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    arguments = [word for name, value in options.items() if value is not None for word in (name, value)]
    return invoked(commands, "convert", file, *arguments, *flags, stdin=content, prog_name="kp-scorer")


def rows(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_converted_traces_can_be_read() -> None:
    done = run(json_lines(CHAT, CHAT["messages"]), "--failed")
    assert done.exit_code == 0, done.output
    assert done.stderr == "converted 2 of 2 runs: 2 steps, 0 tool calls, 0 errors, 0 error recoveries; 0 tools in 2 of 2 runs\n"
    (trace, _) = rows(done)
    assert trace["metadata"]["task_domain"] == "customer_service"
    assert trace["metadata"]["success"] is False
    assert trace["outcome"] == {"result_summary": "Two messages.", "confidence": 0.75}
    lines = list(read_traces(io.BufferedReader(io.BytesIO(done.stdout_bytes)), LIMITS))
    assert [isinstance(line.trace, InvalidTrace) for line in lines] == [False, False]


def test_invalid_records_are_reported_and_the_rest_is_converted() -> None:
    mute = {"messages": [user("Any mail?"), assistant(5)]}
    done = run(b"{broken\n\n" + json_lines(mute, CHAT), "--success")
    assert done.exit_code == 1
    (trace,) = rows(done)
    assert trace["@type"] == "ReasoningTrace"
    assert done.stderr.startswith("line 1: $: expected JSON; ")
    assert "\nline 3: messages.1.content: expected a text or a list of parts\n" in done.stderr
    assert done.stderr.endswith(
        "converted 1 of 2 runs: 1 steps, 0 tool calls, 0 errors, 0 error recoveries; 0 tools in 1 of 1 runs\n"
    )


def test_chats_before_the_damage_to_a_file_are_converted() -> None:
    done = run(gzip.compress(json_lines(CHAT, CHAT["messages"])) + b"something else", "--success")
    assert (done.exit_code, len(rows(done))) == (2, 2)
    assert "a compressed file that is damaged" in done.stderr


CALLING: Final = assistant(None, call("c", "mail", "{}"))


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"\n", "nothing to convert in -\n"),
        (
            json_lines(test_adapter_otel.of_another_run(1, 0)),
            "nothing to convert in -\nconverted 0 of 0 runs: 0 steps, 0 tool calls, 0 errors, 0 error recoveries; "
            "1 traces without an agent left out\n",
        ),
        (
            json_lines([CHAT["messages"][0], CALLING, result("c", "Error: locked"), CALLING, result("c", "two")], CHAT),
            "converted 2 of 2 runs: 5 steps, 2 tool calls, 1 errors, 1 error recoveries; 0 tools in 1 of 2 runs\n",
        ),
        (
            json_lines(CHAT, [*CHAT["messages"], user("Read them.")]),
            "converted 1 of 1 runs: 2 steps, 0 tool calls, 0 errors, 0 error recoveries; 0 tools in 1 of 1 runs; "
            "1 chats go on in another\n",
        ),
        (
            json_lines(test_adapter_otel.export(*test_adapter_otel.ODD), test_adapter_otel.of_another_run(1, 0)),
            "converted 1 of 1 runs: 3 steps, 1 tool calls, 0 errors, 0 error recoveries; "
            "1 values that are not understood left out; 1 traces without an agent left out\n",
        ),
    ],
    ids=["nothing", "no agent", "tools and recoveries", "a chat that goes on", "what is left out"],
)
def test_converted_runs_are_counted(content: bytes, note: str) -> None:
    done = run(content, "--success")
    assert (done.exit_code, done.stderr) == (0, note)


def test_options_that_are_missing_are_asked_for_all_at_once() -> None:
    done = run(json_lines(CHAT, CHAT["messages"]), confidence=None, domain=None, created_at=None)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "expected --success or --failed; or, where" in done.stderr
    # The message also names fields that only later runs lack.
    spans = test_adapter_otel.export(test_adapter_otel.chat(0, 5, [test_adapter_otel.ASKED], [test_adapter_otel.ANSWERED]))
    done = run(json_lines(spans, CHAT), confidence=None, created_at=None)
    assert "expected --success or --failed; or" in done.stderr
    # If any run can be converted, a run that lacks a field is refused alone, wherever it is, and the others go on.
    done = run(json_lines(CHAT, CHAT | {"reward": 1}, [user("Any post?"), assistant("None.")]), success_field="reward")
    assert (done.exit_code, len(rows(done))) == (1, 1)
    for number in (1, 3):
        line = f"line {number}: metadata.success: expected --success or --failed: the source does not state it\n"
        assert line in done.stderr


def test_fields_that_nothing_states_are_assumed_and_noted(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_bytes(json_lines(CHAT, [user("Any news?"), assistant("None.")]))
    os.utime(file, (1_767_225_600, 1_767_225_600))
    done = run(b"", "--success", file=str(file), confidence=None, domain=None, created_at=None)
    (first, second) = rows(done)
    assert first["metadata"]["created_at"] == second["metadata"]["created_at"] == "2026-01-01T00:00:00+00:00"
    assert (first["metadata"]["task_domain"], first["outcome"]["confidence"]) == ("default", 0.5)
    assert (
        "assumed, as nothing says it: confidence 0.5 (--confidence) in 2 runs, domain default (--domain) in 2 runs, "
        "the time of the file (--created-at) in 2 runs\n"
    ) in done.stderr


def test_rating_that_is_read_as_a_success_and_calls_without_arguments_are_noted() -> None:
    bare = [CHAT["messages"][0], assistant(None, call("c", "mail", None)), result("c", "two")]  # type: ignore[arg-type]
    done = run(json_lines({"stars": 5, "messages": bare}), success_field="stars")
    assert "; 1 calls without arguments; 1 runs have a success of more than 1" in done.stderr


def test_ids_of_a_field_that_several_runs_have_get_numbers() -> None:
    chats = [{"n": "a", "messages": [user(f"Question {number}"), assistant("Yes.")]} for number in (1, 2, 1, 3)]
    done = run(json_lines(*chats), "--success", id_field="n")
    assert {row["task"]["objective"]: row["id"].rpartition(":")[2] for row in rows(done)} == {
        "Question 1": "a",
        "Question 2": "a-2",
        "Question 3": "a-3",
    }
    assert "; 2 runs got a number behind an id of --id-field that others have" in done.stderr


def test_traces_are_private_unless_an_option_says_otherwise() -> None:
    (trace,) = rows(run(json_lines(CHAT), "--success", visibility=None, privacy_level=None))
    assert (trace["metadata"]["visibility"], trace["metadata"]["privacy_level"]) == ("private", "private")


FIELDS: Final = {"success": "verifier.reward", "confidence": "sure", "domain": "meta.task.domain", "id": "n", "time": "at"}


def test_values_are_taken_from_fields_of_each_record() -> None:
    record = CHAT | {"verifier": {"reward": 0.5}, "sure": 0.25, "meta": json.dumps({"task.domain": "code"})}
    record |= {"n": 7, "at": 1_767_225_600_000}
    done = run(json_lines(record, record | {"sure": "very"}), **{f"{name}_field": path for name, path in FIELDS.items()})
    (trace,) = rows(done)
    assert trace["id"] == "kp:trace:openai:7"
    assert trace["metadata"] | {"success": True, "task_domain": "code"} == trace["metadata"]
    assert trace["metadata"]["created_at"] == "2026-01-01T00:00:00+00:00"
    assert trace["outcome"]["confidence"] == 0.25
    assert "line 2: sure: expected a number from 0 to 1\n" in done.stderr
    assert [row.get("state") for row in rows(run(json_lines(CHAT | {"reward": 0.49}), success_field="reward"))] == [None]


@pytest.mark.parametrize("odd", [10**400, -1, math.inf, "x", [], {}, "2026", "\ud800", True])
@pytest.mark.parametrize("name", ["success", "confidence", "domain", "time", "id"])
def test_odd_values_of_fields_give_a_trace_or_an_error_that_names_the_field(name: str, odd: object) -> None:
    done = run(json_lines(CHAT | {"odd": odd}), "--success", **{f"{name}_field": "odd"})
    assert len(rows(done)) == 1 or done.stderr.startswith(("line 1: odd: ", "line 1: $: "))


def test_fields_that_were_not_read_are_counted() -> None:
    done = run(json_lines(CHAT | {"reward": 1, "usage": {"total": 9}}, CHAT["messages"], CHAT | {"reward": 2}), "--success")
    assert done.stderr.endswith("fields not read, and in how many runs: reward (2), usage (1)\n")
    done = run(json_lines(CHAT | {"reward": 1}), success_field="reward")
    assert "not read" not in done.stderr


def test_files_of_folders_are_read_in_their_order_and_errors_name_them(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.json").write_bytes(b"{broken")
    (tmp_path / "b" / "2.JSONL").write_bytes(json_lines(CHAT))
    (tmp_path / "b" / "1.ndjson.gz").write_bytes(gzip.compress(json_lines(CHAT["messages"])))
    (tmp_path / "b" / "readme.txt").touch()
    (tmp_path / "b" / "table.CSV").touch()
    (tmp_path / "b" / "forged.\nline").touch()
    done = run(b"", "--success", file=str(tmp_path))
    assert f"{tmp_path}: not read: 1 .\\u000aline, 1 .txt, 1 .csv; only .json" in done.stderr
    assert f"{tmp_path}/a.json: line 1: $: expected JSON" in done.stderr
    assert len(rows(done)) == 2
    mute = tmp_path / "mute.json"
    mute.write_bytes(b"\n" + json_lines([user("Any post?")]))
    done = run(b"", "--success", str(mute), file=str(tmp_path / "b"))
    assert f"{mute}: line 2: $: expected" in done.stderr


def test_entries_of_a_folder_that_are_not_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(CHAT))
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(tmp_path / "pipe.jsonl")
    # A folder whose path has more than 4,096 bytes cannot be listed.
    place = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("x" * 250, dir_fd=place)
        outer, place = place, os.open("x" * 250, os.O_RDONLY, dir_fd=place)
        os.close(outer)
    os.close(place)
    done = run(b"", "--success", file=str(tmp_path))
    assert f"{tmp_path}: not read: 1 link to a folder, 1 pipe or device; only .json" in done.stderr
    assert "gone.jsonl: No such file or directory" in done.stderr
    assert "xxx: File name too long" in done.stderr
    assert (len(rows(done)), done.exit_code) == (1, 1)


def test_output_of_the_command_is_not_read_as_its_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(CHAT))
    output = tmp_path / "traces.jsonl"
    command = [sys.executable, "-m", "kp_scorer.cli", "convert", "--success"]
    notes = {str(tmp_path): "not read: 1 output of this command; only", str(output): "the output of this command goes to it"}
    for exit_code, (name, note) in enumerate(notes.items()):
        with output.open("wb") as stdout:
            # A command that reads what it writes never ends.
            done = subprocess.run(
                [*command, str(tmp_path / "a.jsonl"), name], stdout=stdout, stderr=subprocess.PIPE, timeout=100
            )
        assert (done.returncode, note in done.stderr.decode()) == (exit_code, True), done.stderr
        assert len(output.read_bytes().splitlines()) == 2 - exit_code


def test_file_of_a_year_beyond_9999_is_converted() -> None:
    # A tmpfs holds such times, as Btrfs does; other file systems replace them.
    memory = Path("/dev/shm")
    with tempfile.NamedTemporaryFile(dir=memory if memory.is_dir() else None, suffix=".jsonl") as file:
        file.write(json_lines(CHAT))
        file.flush()
        os.utime(file.name, (2**40, 2**40))
        assert len(rows(run(b"", "--success", file=file.name))) == 1


def test_each_source_is_read_by_its_shape_and_traces_of_ours_pass() -> None:
    own = minimal_payload(trace_id="kp:trace:own") | {"unknown": [1.5, None]}
    span = test_adapter_otel.export(*test_adapter_otel.WINDY)
    done = run(json_lines(own, span, CHAT, test_adapter_langfuse.EXPORTED_TRACE, {"x": 1}, {"x": 2}), "--success")
    assert done.exit_code == 1
    assert {row["id"].split(":")[2] for row in rows(done)} == {"own", "otel", "openai", "langfuse"}
    assert rows(done)[0] == own
    assert done.stderr.startswith("lines 5, 6: $: neither a trace")
    assert "it is an object with 1 fields of other names" in done.stderr


def test_file_that_is_read_nowhere_is_one_report_with_its_first_places(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(json_lines(*({"x": number} for number in range(50))))
    (tmp_path / "b.json").write_bytes(b"# Title\n\n" + b"Some words.\n" * 50)
    done = run(b"", "--success", file=str(tmp_path))
    foreign, markdown = done.stderr.splitlines()
    assert foreign.startswith(f"{tmp_path}/a.json: lines 1, 2, 3 and 47 more: $: neither a trace")
    assert markdown.startswith(f"{tmp_path}/b.json: lines 1, 3, 4 and 48 more: $: expected JSON")
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["claude-code", "span-rows"])
def test_source_without_a_record_of_the_named_format_is_reported(name: str) -> None:
    done = run(json_lines(CHAT, {"type": "summary", "summary": "x", "leafUuid": "u"}, CHAT["messages"]), f"--from={name}")
    assert (done.exit_code, f": $: expected the format {name}; it is an object with messages" in done.stderr) == (1, True)
    # Among the lines of a session, others are skipped, as they are if the format is detected.
    done = run(json_lines({"x": 1}, *test_adapter_agents.CLAUDE), "--success", "--from=claude-code")
    assert (done.exit_code, len(rows(done))) == (0, 1)


def test_lines_of_a_session_that_are_no_turns_are_skipped_and_counted(tmp_path: Path) -> None:
    header = {"type": "session", "id": "s1", "timestamp": "2026-03-01T08:00:00Z"}
    prompt = {"type": "turn.prompt", "input": [{"type": "text", "text": "Any mail?"}]}
    lines = [header, *[prompt] * 101, *CHAT["messages"], {"type": "mode", "mode": "x"}]
    (tmp_path / "a.jsonl").write_bytes(json_lines(*lines))
    claude = [{"type": "last-prompt", "lastPrompt": "x"}, *test_adapter_agents.CLAUDE, {"type": "pr-link", "url": "x"}]
    (tmp_path / "b.jsonl").write_bytes(json_lines(*claude))
    done = run(b"", "--success", file=str(tmp_path), created_at=None)
    assert [row["id"] for row in rows(done)] == ["kp:trace:session:s1", "kp:trace:claude-code:s1"]
    assert rows(done)[0]["metadata"]["created_at"] == header["timestamp"]
    assert (done.exit_code, "; 106 values that are not understood left out" in done.stderr) == (0, True), done.stderr


def test_halves_of_characters_and_numbers_that_json_lacks_are_replaced() -> None:
    calling = assistant("b\udcb2", call("c", "mail", '{"days": NaN, "of": "\\ud800"}'))
    done = run(json_lines([user("a\ud800"), calling, result("c", "two")]), "--success")
    (trace,) = rows(done)
    assert trace["task"]["objective"] == "a\ufffd"
    assert trace["steps"][0]["content"] == "b\ufffd"
    assert trace["steps"][1]["input"] == {"days": None, "of": "\ufffd"}
    assert "1 runs cut to the limits, or mended" in done.stderr


def test_byte_order_mark_within_a_file_costs_no_line() -> None:
    assert len(rows(run(json_lines(CHAT) + b"\xef\xbb\xbf" + json_lines(CHAT["messages"]), "--success"))) == 2


def test_long_run_is_cut_to_the_limits() -> None:
    writes = [
        [assistant(None, call(f"c{number}", "write", json.dumps({"text": "x" * 90_000}))), result(f"c{number}", "done")]
        for number in range(6)
    ]
    done = run(json_lines([user("Write."), *(each for pair in writes for each in pair)]), "--success")
    (trace,) = rows(done)
    assert trace["steps"][0]["input"] == {"text": "x" * 90_000}
    assert trace["steps"][0]["content"].endswith(" [cut: 90019 characters]")
    (trace,) = rows(run(json_lines([user("Read."), CALLING, result("c", "x" * 100_001)]), "--success"))
    assert trace["steps"][1]["content"].endswith("x [cut: 100001 characters]")
    assert len(trace["steps"][1]["content"]) == LIMITS.field_chars


@pytest.mark.parametrize("indent", [None, 2])
def test_input_that_arrives_piece_by_piece_is_converted_as_it_arrives(indent: int | None) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as source:  # noqa: PTH123 - of descriptors
        lines = read_traces(stream, LIMITS, Conversion(SUPPLIED, LIMITS))
        for number in range(3):
            export = test_adapter_langfuse.EXPORTED_TRACE | {"id": f"t{number}"}
            source.write(json.dumps(export, indent=indent).encode() + b"\n")
            assert next(lines).document["id"] == f"kp:trace:langfuse:t{number}"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("confidence", "1.01"),
        ("confidence", "high"),
        ("domain", "a\x1b[2J"),
        ("visibility", "public"),
        ("created_at", "2026-01-31"),
        ("from", "mlflow"),
    ],
)
def test_invalid_options_are_refused_before_reading(option: str, value: str) -> None:
    done = run(b"{broken\n", "--success", **{option: value})
    assert done.exit_code == 2
    assert f"--{option.replace('_', '-')}" in done.stderr
    assert done.stdout == ""


def test_limits_of_the_settings_apply() -> None:
    wordy = {"messages": [user("Say it."), *([{"role": "assistant", "content": "word"}] * 1_000)]}
    done = run(json_lines(wordy, CHAT), "--success", "--set", "queues.message_bytes=4000")
    assert (done.exit_code, len(rows(done))) == (1, 1)
    assert "line 1: $: expected at most 4000 bytes" in done.stderr
    assert "(a larger `queues.message_bytes` raises this limit)" in done.stderr


def test_example_of_the_document_converts_as_described() -> None:
    (source,) = [json.loads(block) for block in blocks("worker/CONVERT.md") if block.startswith("{")]
    (chat,) = converted("", source)
    assert [step["type"] for step in chat["steps"]] == ["tool_call", "observation", "thought"]
    assert chat["outcome"]["result_summary"] == "At 04:12."


def test_sessions_are_scored_at_the_end_of_each_file(tmp_path: Path) -> None:
    for name in ("1.jsonl", "2.jsonl"):
        lines = [line | {"sessionId": name, "uuid": name, "timestamp": None} for line in test_adapter_agents.CLAUDE[1:]]
        (tmp_path / name).write_bytes(json_lines(*lines))
    supplied = ["--domain", "code", "--confidence", "0.5", "--success", "--created-at", "2026-01-31T12:00Z"]
    supplied += ["--set", "embedding.embedder=words"]
    done = CliRunner().invoke(commands, ["score", str(tmp_path), *supplied])
    assert [row["trace_id"] for row in rows(done)] == [f"kp:trace:claude-code:{name}" for name in ("1.jsonl", "2.jsonl")]


def scored(content: bytes, *arguments: str) -> Result:
    return invoked(commands, "score", "-", "--set", "embedding.embedder=words", *arguments, stdin=content)


def test_score_converts_other_formats_and_leaves_traces_unchanged() -> None:
    own = minimal_payload(trace_id="kp:trace:own")
    supplied = ("--domain", "code", "--confidence", "0.5", "--success", "--created-at", "2026-01-31T12:00:00Z")
    alone, mixed = scored(json_lines(own)), scored(json_lines(own, CHAT), *supplied)
    assert (alone.exit_code, mixed.exit_code) == (0, 0), mixed.output
    (decision,), (same, converted_chat) = rows(alone), rows(mixed)
    assert [decision[key] for key in ("score", "dimensions")] == [same[key] for key in ("score", "dimensions")]
    assert converted_chat["trace_id"].startswith("kp:trace:openai:")
    assert "converted 1 of 1 runs" in mixed.stderr


def test_score_asks_for_options_that_are_missing() -> None:
    done = scored(json_lines(CHAT))
    assert done.exit_code == 2
    assert "expected --success or --failed" in done.stderr


def half(kind: str, day: str, number: int) -> dict[str, Any]:
    answer = {"body": {"choices": [{"message": assistant(f"{day}, {number}.")}]}}
    content = {"body": {"messages": [user(f"Which day, {day}?")]}} if kind == "request" else {"response": answer}
    return {"custom_id": f"request-{number}"} | content


@pytest.mark.parametrize(
    ("order", "count"),
    [
        (["monday-request", "monday-response", "tuesday-request"], 1),
        (["monday-request", "tuesday-request", "monday-response", "tuesday-response"], 0),
        (["monday-response", "tuesday-response", "monday-request", "tuesday-request"], 0),
        (["monday-request+response", "tuesday-request+response"], 2),
        (["monday-request+response", "tuesday-request", "tuesday-response"], 2),
    ],
)
def test_no_question_gets_the_answer_of_another_batch(order: list[str], count: int, tmp_path: Path) -> None:
    for place, name in enumerate(order):
        day, _, kinds = name.partition("-")
        lines = [half(kind, day, number) for kind in kinds.split("+") for number in (1, 2)]
        (tmp_path / f"{place}.jsonl").write_bytes(json_lines(*lines))
    done = run(b"", "--success", file=str(tmp_path))
    traces = [row for row in rows(done) if "task" in row]
    assert len(traces) == 2 * count
    for trace in traces:
        day = trace["outcome"]["result_summary"].partition(",")[0]
        assert trace["task"]["objective"] == f"Which day, {day}?"
    assert ("with its custom_id" in done.stderr) == (count == 0)
