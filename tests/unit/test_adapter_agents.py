"""Sessions of Claude Code and Codex, and trajectories of Harbor, OpenHands, mini-swe-agent and SWE-agent, become traces."""

from typing import Any, Final

import pytest

from tests.support.converting import converted, converted_and_refused, steps_in, steps_of
from tests.unit.test_adapter_openai import assistant, call, result, user

Json = dict[str, Any]


def of_claude(kind: str, content: object, **fields: object) -> Json:
    """Return a line of a session of Claude Code."""
    message = {"role": kind, "content": content}
    return {"type": kind, "uuid": "u", "sessionId": "s1", "timestamp": "2026-03-01T08:00:00Z", "message": message} | fields


def of_codex(kind: str, **payload: object) -> Json:
    """Return a line of a session of Codex."""
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
        user("When is high water?"),
        assistant("I look it up.\n\n```bash\ntide esbjerg\n```"),
        user("04:12"),
        assistant("At 04:12."),
    ],
    "trajectory_format": "mini-swe-agent-1",
}
MINI_WITH_CALLS: Final[Json] = MINI | {
    "messages": [
        *MINI["messages"][:2],
        assistant("I look it up.", call("t1", "bash", '{"command": "tide esbjerg"}')),
        result("t1", "04:12"),
        MINI["messages"][4],
        {"role": "exit", "content": "At 04:12.", "extra": {"exit_status": "Submitted"}},
    ]
}


def test_each_format_is_recognised_and_gives_the_same_trace_with_the_id_of_its_session() -> None:
    of_sessions = [("claude-code:s1", CLAUDE), ("codex:c1", CODEX), ("atif:a1", [ATIF])]
    for own, sources in (*of_sessions, (None, [MINI]), (None, [MINI_WITH_CALLS])):
        (trace,) = converted("", *sources)
        assert trace["task"]["objective"] == "When is high water?"
        thought, (kind, tool, content), result, answer = steps_in(trace)
        assert (thought[0], thought[1].rstrip("\n")) == ("thought", "I look it up.")
        assert (kind, tool.lower(), content.lower()) == ("tool_call", "bash", 'bash({"command": "tide esbjerg"})')
        assert (result, answer) == (("observation", "04:12"), ("thought", "At 04:12."))
        assert trace["outcome"]["result_summary"] == "At 04:12."
        if own:
            assert (trace["id"], trace["metadata"]["created_at"]) == (f"kp:trace:{own}", "2026-03-01T08:00:00Z")
    assert converted("", ATIF)[0]["metadata"]["framework"] == "pilot"


def test_work_of_a_subagent_is_a_run_of_its_own() -> None:
    inner = [line | {"isSidechain": True, "agentId": "b2"} for line in CLAUDE[2:]]
    ids = [trace["id"].removeprefix("kp:trace:claude-code:") for trace in converted("", *CLAUDE, *inner)]
    assert ids == ["s1", "s1:b2"]


def at_hour(lines: list[Json], hour: int) -> list[Json]:
    return [line | {"timestamp": f"2026-03-01T{hour:02}:00:00Z"} for line in lines]


@pytest.mark.parametrize("beginning", [{}, {"id": 7}, {"id": ""}])
def test_codex_sessions_whose_beginnings_are_broken_join_no_other(beginning: Json) -> None:
    broken = [of_codex("session_meta", **beginning), *CODEX[2:]]
    traces, refused = converted_and_refused("", [*CODEX, *at_hour(broken, 9), *at_hour(broken, 10)])
    (alone,) = converted("", *CODEX)
    assert alone in traces
    assert [steps_in(trace) for trace in traces] == [steps_in(alone)] * 3
    assert [error.line for error in refused] == [len(CODEX) + 1, len(CODEX) + len(broken) + 1]


def of_swe(thought: str, action: str, observation: str, **more: object) -> Json:
    response = f"{thought}\n```\n{action}\n```"
    return {"thought": thought, "action": action, "observation": observation, "response": response, "state": {}, **more}


SWE_HISTORY: Final = [
    {"role": "system", "content": "SETTING: you work in a shell.", "agent": "main", "message_type": "system_prompt"},
    {"role": "user", "content": "Here is how somebody else did it.", "is_demo": True},
    {"role": "user", "content": "ISSUE: rounding() loses a cent.", "agent": "main", "message_type": "observation"},
]
TRAJECTORY: Final = [
    of_swe("First I look around.", "ls -F\n", "money.py  tests/", execution_time=0.25),
    of_swe("I run the tests.", "python -m pytest -q\n", "Traceback (most recent call last):\nModuleNotFoundError: pytest"),
    of_swe("Done.", "submit\n", "diff --git a/money.py b/money.py"),
]
RUN: Final = {
    "environment": "main",
    "trajectory": TRAJECTORY,
    "history": SWE_HISTORY,
    "info": {"exit_status": "submitted", "submission": "diff --git a/money.py b/money.py", "model_stats": {"api_calls": 3}},
}


def test_trajectory_is_a_trace() -> None:
    (trace,) = converted("sweagent", RUN)
    assert trace["task"] == {"objective": "ISSUE: rounding() loses a cent."}
    assert steps_in(trace) == [
        ("thought", "First I look around."),
        ("tool_call", "ls", "ls -F\n"),
        ("observation", "money.py  tests/"),
        ("thought", "I run the tests."),
        ("tool_call", "python", "python -m pytest -q\n"),
        ("observation", "Traceback (most recent call last):\nModuleNotFoundError: pytest"),
        ("error_recovery", "Done."),
        ("tool_call", "submit", "submit\n"),
        ("observation", "diff --git a/money.py b/money.py"),
    ]
    assert trace["steps"][1]["input"] == {"command": "ls -F\n"}
    assert trace["steps"][1]["latency_ms"] == 250
    assert trace["outcome"]["result_summary"] == "diff --git a/money.py b/money.py"
    assert trace["metadata"]["framework"] == "SWE-agent"


def test_functions_that_the_model_called_are_the_tools() -> None:
    function = {"id": "call_9", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls -F\\n"}'}}
    message = {"role": "assistant", "content": "First I look around.", "action": "ls -F\n", "tool_calls": [function]}
    (trace,) = converted("sweagent", RUN | {"history": [*SWE_HISTORY, message]})
    assert trace["steps"][1]["tool"] == {"name": "bash"}
    assert trace["steps"][1]["input"] == {"command": "ls -F\n"}
    assert trace["steps"][1]["content"] == "ls -F\n"
    assert trace["steps"][4]["tool"] == {"name": "python"}


@pytest.mark.parametrize("key", ["query", "messages"])
def test_without_a_history_the_first_input_of_the_model_is_the_objective(key: str) -> None:
    steps = [TRAJECTORY[0] | {key: SWE_HISTORY}, *TRAJECTORY[1:]]
    (trace,) = converted("sweagent", {"trajectory": steps, "info": {}})
    assert trace["task"]["objective"] == "ISSUE: rounding() loses a cent."
    assert trace["outcome"]["result_summary"] == "Done."


def test_step_without_a_command_is_a_thought() -> None:
    stopped = {"response": "I stop.", "action": "", "observation": None}
    assert steps_of("sweagent", RUN | {"trajectory": [stopped]}) == [("thought", "I stop.")]


BROKEN: Final[list[tuple[Json, str]]] = [
    ({"trajectory": None}, "trajectory"),
    ({"trajectory": {}}, "trajectory"),
    ({"trajectory": []}, "$"),
    ({"trajectory": [*TRAJECTORY, 5]}, "trajectory.3"),
    ({"trajectory": [TRAJECTORY[0] | {"action": ["ls"]}]}, "trajectory.0.action"),
    ({"trajectory": [TRAJECTORY[0] | {"execution_time": -1}]}, "trajectory.0.execution_time"),
    ({"history": [{"role": "system", "content": "x"}]}, "$"),
    ({"history": 5}, "history"),
    ({"info": {"submission": 5}}, "info.submission"),
]


def forked(*lines: Json) -> list[Json]:
    """Return a fork of the session ``CODEX``, which repeats its lines and goes on with these."""
    return [of_codex("session_meta", id="c2", forked_from_id="c1"), *CODEX, *at_hour(list(lines), 9)]


MORE: Final = (
    of_codex("event_msg", type="user_message", message="And tomorrow?"),
    of_codex("response_item", type="message", role="assistant", content=[{"type": "output_text", "text": "At 05:01."}]),
)


def test_a_fork_is_a_run_of_its_own_and_lines_that_it_repeats_count_once() -> None:
    (alone,) = converted("", *forked(*MORE))
    assert alone["id"] == "kp:trace:codex:c2"
    assert steps_in(alone)[-2:] == [("observation", "And tomorrow?"), ("thought", "At 05:01.")]
    parent, fork = converted("", *CODEX, *forked(*MORE))
    assert parent["id"] == "kp:trace:codex:c1"
    assert (fork["id"], fork["task"]["objective"], steps_in(fork)) == (alone["id"], "And tomorrow?", [("thought", "At 05:01.")])
    assert converted("", *CODEX, *forked()) == converted("", *CODEX)


def of_chain(kind: str, content: object, own: str, parent: str | None, **fields: object) -> Json:
    """Return a line of a Claude Code session with its own id and the id of the line before it."""
    return of_claude(kind, content, uuid=own, parentUuid=parent, timestamp=f"2026-03-01T08:00:{len(own):02}Z", **fields)


USED: Final = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}
RETURNED: Final = {"type": "tool_result", "tool_use_id": "t1", "content": "a"}
CHAIN: Final = [
    of_chain("user", "List the fils", "x1", None),
    of_chain("assistant", [{"type": "text", "text": "Which fils?"}], "x2", "x1"),
    of_chain("user", "List the files", "u1", None),
    of_chain("assistant", [USED], "a1", "u1"),
    of_chain("user", [RETURNED], "r1", "a1"),
    of_chain("assistant", [USED | {"id": "t2", "input": {"command": "pwd"}}], "a2", "a1"),
    of_chain("user", [RETURNED | {"tool_use_id": "t2"}], "r2", "a2"),
    of_chain("assistant", [{"type": "text", "text": "One."}], "a3", "r2"),
]
LISTED: Final = [
    ("tool_call", "Bash", 'Bash({"command": "ls"})'),
    ("observation", "a"),
    ("tool_call", "Bash", 'Bash({"command": "pwd"})'),
    ("observation", "a"),
    ("thought", "One."),
]


def test_branch_that_was_given_up_is_no_part_of_the_run_and_parallel_calls_are() -> None:
    (trace,) = converted("", *CHAIN)
    assert trace["task"]["objective"] == "List the files"
    assert steps_in(trace) == LISTED
    # If the chain of lines does not lead back to a beginning, all lines are read.
    assert len(steps_of("", *CHAIN[:-1], CHAIN[-1] | {"parentUuid": "lost"})) == len(LISTED) + 2


@pytest.mark.parametrize(
    "again",
    [
        CHAIN,
        [line | {"uuid": f"z{line['uuid']}"} for line in CHAIN],
        [line | {"sessionId": "s2"} for line in CHAIN],
        [
            CHAIN[-1]
            | {"message": {"role": "assistant", "content": [{"type": "text", "text": "One."}], "id": "m"}, "uuid": "a3"}
        ],
    ],
    ids=["the same lines", "under other ids", "in another session", "one of them"],
)
def test_lines_that_are_recorded_again_count_once(again: list[Json]) -> None:
    assert steps_of("", *CHAIN, *again) == LISTED


def test_beginning_of_a_text_that_is_recorded_while_it_is_streamed_is_left_out() -> None:
    longer = [of_claude("assistant", [{"type": "text", "text": text}]) for text in ("It i", "It is", "It is four.")]
    for line in longer:
        line["message"]["id"] = "m1"
    assert steps_of("", of_claude("user", "What is 2 + 2?"), *longer) == [("thought", "It is four.")]


PROGRAM: Final = [
    of_claude("user", "<local-command-caveat>Ignore this.</local-command-caveat>", isMeta=True),
    of_claude("user", "<command-name>/clear</command-name>\n<command-args></command-args>"),
    of_claude("user", "<local-command-stdout></local-command-stdout>"),
    of_claude("user", "This session goes on from another.", isCompactSummary=True),
]


REMINDED: Final = [
    {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
    {"type": "text", "text": "What is 2 + 2?"},
]
COMMAND: Final = (
    "<command-message>review</command-message><command-name>/review</command-name><command-args>the PR</command-args>"
)


@pytest.mark.parametrize(("content", "objective"), [(REMINDED, "What is 2 + 2?"), (COMMAND, "/review the PR")])
def test_texts_of_the_program_are_neither_the_users_nor_the_agents(content: object, objective: str) -> None:
    failed = of_claude("assistant", [{"type": "text", "text": "API Error: 500"}], isApiErrorMessage=True)
    stopped = of_claude("user", [{"type": "text", "text": "[Request interrupted by user]"}])
    (trace,) = converted("", *PROGRAM, of_claude("user", content), failed, stopped, *CLAUDE[-1:])
    assert (trace["task"]["objective"], steps_in(trace)) == (objective, [("thought", "At 04:12.")])


def test_subagents_of_earlier_versions_are_told_apart_by_their_lines() -> None:
    def inner(own: str) -> list[Json]:
        asked = of_chain("user", f"Count {own}", own, None, isSidechain=True)
        return [asked, of_chain("assistant", [{"type": "text", "text": "Three."}], f"{own}2", own, isSidechain=True)]

    traces = converted("", *inner("files"), *inner("folders"))
    assert [trace["id"].removeprefix("kp:trace:claude-code:s1:") for trace in traces] == ["files", "folders"]
    assert [trace["task"]["objective"] for trace in traces] == ["Count files", "Count folders"]


def test_sessions_of_qwen_code_have_contents_of_gemini() -> None:
    def line(kind: str, *parts: Json, **fields: object) -> Json:
        return of_claude(kind, None, message={"role": kind, "parts": list(parts)}, **fields)

    hint = {"text": "<qwen:user-prompt-submit-context>\nA hint.\n</qwen:user-prompt-submit-context>"}
    returned = {"functionResponse": {"id": "c", "name": "read_file", "response": {"output": "ok"}}}
    (trace,) = converted(
        "",
        line("user", {"text": "Read it."}, hint),
        line("model", {"functionCall": {"id": "c", "name": "read_file", "args": {}}}) | {"type": "assistant"},
        line("user", returned) | {"type": "tool_result"},
        line("user", {"text": "A job has ended."}, subtype="notification"),
        line("model", {"text": "It is fine."}) | {"type": "assistant"},
    )
    assert trace["task"]["objective"] == "Read it."
    assert steps_in(trace) == [("tool_call", "read_file", "read_file({})"), ("observation", "ok"), ("thought", "It is fine.")]
    assert trace["metadata"]["framework"] == "qwen-code"


@pytest.mark.parametrize("output", ["Process exited with code 127\nOutput:\nnot found", '{"metadata": {"exit_code": 127}}'])
def test_code_of_a_command_that_failed_is_an_error(output: str) -> None:
    returned = of_codex("response_item", type="function_call_output", call_id="t1", output=output)
    again = of_codex("response_item", type="function_call", name="Bash", arguments="{}", call_id="t2")
    (trace,) = converted("", *CODEX[:6], returned, again, *CODEX[-1:])
    assert [step["type"] for step in trace["steps"]].count("error_recovery") == 1


def test_trajectory_that_continues_another_has_what_was_asked_there() -> None:
    copied = [step | {"is_copied_context": True} for step in ATIF["steps"]]
    linked = {"step_id": 5, "source": "system", "message": "x", "observation": {"results": [{"subagent_trajectory_ref": []}]}}
    (trace,) = converted("", ATIF | {"steps": [*copied, linked, {"source": "agent", "message": "At 05:01."}]})
    assert trace["task"]["objective"] == "When is high water?"
    assert steps_in(trace) == [("thought", "At 05:01.")]


def of_openhands(number: int, source: str, **fields: object) -> Json:
    return {"id": number, "source": source, **fields}


ASKING: Final = {"action": "message", "args": {"content": "When is high water?"}, "timestamp": "2026-03-01T08:00:00"}
RAN: Final = {"command": "tide", "thought": "I look it up.", "blocking": True}
EVENTS: Final[list[Json]] = [
    of_openhands(0, "agent", action="system", args={"content": "You can use a shell."}),
    of_openhands(1, "user", **ASKING),
    of_openhands(2, "environment", observation="recall", content="Added context", extras={}),
    of_openhands(3, "agent", action="run", args=RAN, tool_call_metadata={"function_name": "bash", "tool_call_id": "t1"}),
    of_openhands(4, "agent", observation="run", content="none", extras={"metadata": {"exit_code": 1}}),
    of_openhands(5, "agent", action="run", args={"command": "tide esbjerg"}),
    of_openhands(6, "agent", observation="run", content="04:12", extras={"metadata": {"exit_code": 0}}),
    of_openhands(7, "agent", action="finish", args={"final_thought": "At 04:12."}),
]


@pytest.mark.parametrize(
    "source", [EVENTS, {"instance_id": "i", "history": EVENTS}, {"instruction": "When is high water?", "history": EVENTS[2:]}]
)
def test_events_of_openhands_are_a_run(source: object) -> None:
    (trace,) = converted("", source)
    assert trace["task"]["objective"] == "When is high water?"
    assert steps_in(trace) == [
        ("thought", "I look it up."),
        ("tool_call", "bash", 'bash({"command": "tide"})'),
        ("observation", "none"),
        ("error_recovery", "run", 'run({"command": "tide esbjerg"})'),
        ("observation", "04:12"),
        ("tool_call", "finish", 'finish({"final_thought": "At 04:12."})'),
    ]
    assert trace["outcome"]["result_summary"] == "At 04:12."


REFUSED: Final = {
    "atif": [(ATIF | {"steps": [{"source": "ghost", "message": "x"}]}, "steps.0.source")],
    "sweagent": [(RUN | change, field) for change, field in BROKEN],
}
EXAMPLES: Final[dict[str, object]] = {"openhands": EVENTS, "sweagent": RUN, "atif": ATIF, "claude-code": CLAUDE, "codex": CODEX}
