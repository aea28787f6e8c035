"""``kp-scorer convert``: what it reads, what it prints, what it asks for."""

import io
import json
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result
from kp_scorer.adapters import FORMATS
from kp_scorer.cli.commands.convert import convert
from kp_scorer.cli.input import read_json, read_traces
from kp_scorer.errors import InvalidTrace

from tests.support.builders import LIMITS
from tests.support.converting import converted
from tests.support.documents import blocks

OPTIONS: Final = {
    "--from": "openai",
    "--confidence": "0.75",
    "--domain": "customer_service",
    "--visibility": "private",
    "--privacy-level": "federated",
    "--created-at": "2026-01-31T12:00:00Z",
}
CHAT: Final = {"messages": [{"role": "user", "content": "Any mail?"}, {"role": "assistant", "content": "Two messages."}]}


def run(content: bytes, *flags: str, file: str = "-", **changed: str | None) -> Result:
    options = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    arguments = [word for name, value in options.items() if value is not None for word in (name, value)]
    return CliRunner().invoke(convert, [file, *arguments, *flags], input=content, prog_name="kp-scorer convert")


def rows(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def json_lines(*sources: object) -> bytes:
    return b"".join(json.dumps(source).encode() + b"\n" for source in sources)


def parsed(content: bytes) -> list[tuple[int, object]]:
    """What is read, with None for what is no JSON."""
    values = read_json(io.BytesIO(content), LIMITS)
    return [(number, None if isinstance(value, InvalidTrace) else value) for number, value in values]


def test_converted_traces_can_be_read() -> None:
    done = run(json_lines(CHAT, CHAT["messages"]), "--failed")
    assert done.exit_code == 0, done.output
    assert done.stderr == "converted 2 of 2: 2 steps, 0 tool calls, 0 error recoveries; 2 without tools\n"
    (trace, _) = rows(done)
    assert trace["metadata"]["task_domain"] == "customer_service"
    assert trace["metadata"]["success"] is False
    assert trace["outcome"] == {"result_summary": "Two messages.", "confidence": 0.75}
    lines = list(read_traces(io.BytesIO(done.stdout_bytes), LIMITS))
    assert [isinstance(line.trace, InvalidTrace) for line in lines] == [False, False]


def test_invalid_records_are_reported_and_the_rest_is_converted() -> None:
    mute = {"messages": [{"role": "user", "content": "Any mail?"}, {"role": "ghost"}]}
    done = run(b"{broken\n\n" + json_lines(mute, CHAT), "--success")
    assert done.exit_code == 1
    broken, invalid, trace = rows(done)
    assert (broken["line"], broken["state"], broken["problems"][0]["field"]) == (1, "invalid", "$")
    assert invalid == {
        "line": 3,
        "state": "invalid",
        "problems": [{"field": "messages.1.role", "expected": "expected system, developer, user, assistant, tool or function"}],
    }
    assert trace["@type"] == "ReasoningTrace"
    assert "line 3: messages.1.role: expected system" in done.stderr
    assert done.stderr.endswith("converted 1 of 3: 1 steps, 0 tool calls, 0 error recoveries; 1 without tools\n")


def test_tools_and_recoveries_are_counted() -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "mail", "arguments": "{}"}}]}
    results = [{"role": "tool", "tool_call_id": "c", "content": text} for text in ("Error: locked", "two")]
    done = run(json_lines([CHAT["messages"][0], call, results[0], call, results[1]], CHAT), "--success")
    assert done.stderr == "converted 2 of 2: 5 steps, 2 tool calls, 1 error recoveries; 1 without tools\n"


def test_empty_input_is_reported() -> None:
    done = run(b"\n")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "nothing to convert in -\n")


@pytest.mark.parametrize("option", ["confidence", "domain", "visibility", "privacy_level", "from"])
def test_options_that_no_format_supplies_are_required(option: str) -> None:
    done = run(json_lines(CHAT), "--success", file="-", **{option: None})
    assert done.exit_code == 2
    assert f"Missing option '--{option.replace('_', '-')}'" in done.stderr


def test_missing_facts_are_named_with_their_options() -> None:
    done = run(json_lines(CHAT), created_at=None)
    assert done.exit_code == 1
    assert [problem["field"] for problem in rows(done)[0]["problems"]] == ["metadata.created_at", "metadata.success"]
    assert "expected --created-at" in done.stderr
    assert "expected --success or --failed" in done.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("confidence", "1.01"),
        ("confidence", "nan"),
        ("confidence", "high"),
        ("domain", ""),
        ("domain", "a\x1b[2J"),
        ("domain", "x" * 201),
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
    wordy = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "word " * 20}]}
    done = run(json_lines(wordy, CHAT), "--success", "--set", "limits.field_chars=99")
    assert done.exit_code == 1
    assert [row.get("problems", [{}])[0].get("field") for row in rows(done)] == ["messages.2", None]


def test_lines_may_be_lists_and_documents_any_json() -> None:
    assert parsed(b"[1]\n\n[2, 3]\n[\n") == [(1, [1]), (3, [2, 3]), (4, None)]
    assert parsed(b"[1,\n2]\n") == [(1, [1, 2])]
    assert parsed(b'{"a":\n1}') == [(1, {"a": 1})]
    assert parsed(b'{"a":\n{"b": 1}\n{"c": 2}\n') == [(1, None), (2, {"b": 1}), (3, {"c": 2})]
    assert parsed(b"[1,\n2") == [(1, None)]


def test_long_line_is_read() -> None:
    long = "x" * (2 * LIMITS.message_bytes)
    assert parsed(json_lines({"a": 1}, long)) == [(1, {"a": 1}), (2, long)]


def test_examples_of_the_document_convert_as_described() -> None:
    sources = [json.loads(block) for block in blocks("worker/CONVERT.md") if block.startswith("{")]
    chat, spans, trajectory, trace = (converted(name, each)[0] for name, each in zip(FORMATS, sources, strict=True))
    assert [step["type"] for step in chat["steps"]] == ["tool_call", "observation", "thought"]
    assert chat["outcome"]["result_summary"] == "At 04:12."
    assert [step["type"] for step in trajectory["steps"]] == ["thought", "tool_call", "observation"]
    assert trajectory["steps"][1]["input"] == {"command": "ls -F\n"}
    assert spans["id"] == "kp:trace:otel:5b8efff798038103d269b633813fc60c"
    assert trace["id"] == "kp:trace:langfuse:tr-1"
    assert [len(each["steps"]) for each in (spans, trace)] == [1, 1]
