"""Sessions of Claude Code and Codex, and trajectories of Harbor: each line or step is what it says."""

from typing import Any, Final

from tests.support.converting import converted, refused_fields, steps_in

Json = dict[str, Any]


def of_claude(kind: str, content: object, **fields: object) -> Json:
    """A line of a session of Claude Code."""
    message = {"role": kind, "content": content}
    return {"type": kind, "uuid": "u", "sessionId": "s1", "timestamp": "2026-03-01T08:00:00Z", "message": message} | fields


def of_codex(kind: str, **payload: object) -> Json:
    """A line of a session of Codex."""
    return {"timestamp": "2026-03-01T08:00:00Z", "type": kind, "payload": payload}


CLAUDE: Final[list[Json]] = [
    {"type": "summary", "summary": "Tides", "leafUuid": "x"},
    of_claude("user", "Caveat: ran by the program", isMeta=True),
    of_claude("user", "When is high water?"),
    of_claude("assistant", [{"type": "thinking", "thinking": "I look it up.", "signature": "x"}]),
    of_claude("assistant", [{"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "tide esbjerg"}}]),
    of_claude("user", [{"type": "tool_result", "tool_use_id": "t1", "content": "04:12", "is_error": False}]),
    {"type": "system", "uuid": "u", "sessionId": "s1", "content": "compacting"},
    of_claude("assistant", [{"type": "text", "text": "At 04:12."}]),
]
CODEX: Final[list[Json]] = [
    of_codex("session_meta", id="c1", cwd="/harbour"),
    of_codex("response_item", type="message", role="user", content=[{"type": "input_text", "text": "<environment_context/>"}]),
    of_codex("event_msg", type="user_message", message="When is high water?"),
    of_codex("turn_context", model="m"),
    of_codex("response_item", type="reasoning", summary=[{"type": "summary_text", "text": "I look it up."}]),
    of_codex("response_item", type="function_call", name="Bash", arguments='{"command": "tide esbjerg"}', call_id="t1"),
    of_codex("response_item", type="function_call_output", call_id="t1", output="04:12"),
    of_codex("response_item", type="message", role="assistant", content=[{"type": "output_text", "text": "At 04:12."}]),
]
ATIF: Final[Json] = {
    "schema_version": "ATIF-v1.4",
    "session_id": "a1",
    "agent": {"name": "pilot", "version": "1", "model_name": "m"},
    "steps": [
        {"step_id": 1, "source": "system", "message": "You know the tides."},
        {"step_id": 2, "source": "user", "message": "When is high water?", "timestamp": "2026-03-01T08:00:00Z"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "I look it up.",
            "tool_calls": [{"tool_call_id": "t1", "function_name": "Bash", "arguments": {"command": "tide esbjerg"}}],
            "observation": {"results": [{"source_call_id": "t1", "content": "04:12"}]},
            "metrics": {"prompt_tokens": 9},
        },
        {"step_id": 4, "source": "agent", "message": [{"type": "text", "text": "At 04:12."}]},
    ],
}
MINI: Final[Json] = {
    "info": {"exit_status": "Submitted", "submission": "At 04:12."},
    "messages": [
        {"role": "system", "content": "You can use a shell."},
        {"role": "user", "content": "When is high water?"},
        {"role": "assistant", "content": "I look it up.\n\n```bash\ntide esbjerg\n```"},
        {"role": "user", "content": "04:12"},
        {"role": "assistant", "content": "At 04:12."},
    ],
    "trajectory_format": "mini-swe-agent-1",
}
MINI_WITH_CALLS: Final[Json] = MINI | {
    "messages": [
        *MINI["messages"][:2],
        {
            "role": "assistant",
            "content": "I look it up.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "tide esbjerg"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "04:12"},
        MINI["messages"][4],
        {"role": "exit", "content": "At 04:12.", "extra": {"exit_status": "Submitted"}},
    ]
}


def test_each_is_recognised_and_says_the_same() -> None:
    for sources in (CLAUDE, CODEX, [ATIF], [MINI], [MINI_WITH_CALLS]):
        (trace,) = converted("", *sources)
        assert trace["task"]["objective"] == "When is high water?"
        thought, (kind, tool, content), result, answer = steps_in(trace)
        assert thought == ("thought", "I look it up.") or thought == ("thought", "I look it up.\n\n")
        assert (kind, tool.lower(), content.lower()) == ("tool_call", "bash", 'bash({"command": "tide esbjerg"})')
        assert (result, answer) == (("observation", "04:12"), ("thought", "At 04:12."))
        assert trace["outcome"]["result_summary"] == "At 04:12."


def test_ids_are_those_of_the_sessions() -> None:
    (claude,), (codex,), (atif,) = converted("", *CLAUDE), converted("", *CODEX), converted("", ATIF)
    ids = [trace["id"].removeprefix("kp:trace:") for trace in (claude, codex, atif)]
    assert ids == ["claude-code:s1", "codex:c1", "atif:a1"]
    assert {trace["metadata"]["created_at"] for trace in (claude, codex, atif)} == {"2026-03-01T08:00:00Z"}
    assert atif["metadata"]["framework"] == "pilot"


def test_what_a_subagent_does_is_a_run_of_its_own() -> None:
    inner = [line | {"isSidechain": True, "agentId": "b2"} for line in CLAUDE[2:]]
    ids = [trace["id"].removeprefix("kp:trace:claude-code:") for trace in converted("", *CLAUDE, *inner)]
    assert ids == ["s1", "s1:b2"]


def test_a_session_begins_where_its_file_says_so() -> None:
    second = [of_codex("session_meta", id="c2"), *CODEX[1:]]
    assert [trace["id"] for trace in converted("", *CODEX, *second)] == ["kp:trace:codex:c1", "kp:trace:codex:c2"]


def test_steps_of_an_unknown_source_are_refused() -> None:
    assert refused_fields("", ATIF | {"steps": [{"source": "ghost", "message": "x"}]}) == [(1, "steps.0.source")]
