"""Turns are found in any envelope and in any list, and calls within texts; all samples hold the same conversation."""

import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.support.converting import converted, converted_and_refused, steps_in, steps_of
from tests.unit.test_adapter_openai import assistant, call, result, user
from tests.unit.test_message_shapes import ANSWER, ARGUMENTS, ASKED, FUNCTION, RETURNED, STEPS, THOUGHT, text

Json = dict[str, Any]

CHAT: Final = [user(ASKED), assistant(THOUGHT, call("c", **FUNCTION)), result("c", RETURNED), assistant(ANSWER)]
TAGGED: Final = f"{THOUGHT}\n<tool_call>\n{json.dumps({'name': 'lock_state', 'arguments': ARGUMENTS})}\n</tool_call>"
CALLED: Final[Json] = {"id": "c", **FUNCTION}
TOOL: Final = {"toolCallId": "c", "toolName": "lock_state", "input": ARGUMENTS, "output": RETURNED}


def exchange(*middle: Json) -> list[Json]:
    """Return messages between the question and the answer."""
    return [user(ASKED), *middle, assistant(ANSWER)]


def conversation(*turns: tuple[str, str]) -> Json:
    return {"conversations": [{"from": author, "value": value} for author, value in turns]}


def parts(*own: Json) -> list[Json]:
    return [
        {"id": "1", "role": "user", "parts": [text(ASKED)]},
        {"id": "2", "role": "assistant", "parts": [text(THOUGHT), {"type": "step-start"}, *own, text(ANSWER)]},
    ]


def part(kind: str, **fields: object) -> Json:
    return {"part_kind": kind, **fields}


def event(kind: str, source: str, **fields: object) -> Json:
    return {"kind": kind, "source": source, **fields}


OF_LOCK: Final = {"tool_name": "lock_state", "tool_call_id": "c"}
ENVELOPES: Final[dict[str, object]] = {
    "under another key": {"task_id": 1, "traj": CHAT},
    "in an object": {"values": {"messages": CHAT}, "next": []},
    "in the item of a list": {"eval": {"task": "t"}, "samples": [{"id": 1, "messages": CHAT}]},
    "in the longest of several lists": {"answer": {"train": [CHAT[:2], CHAT]}},
    "in the events of a session": {"id": "s", "events": [{"author": turn["role"], "content": turn} for turn in CHAT]},
    "with from and value": conversation(
        ("human", ASKED), ("gpt", TAGGED), ("tool", f"<tool_response>\n{RETURNED}\n</tool_response>"), ("gpt", ANSWER)
    ),
    "with a call as a message": conversation(
        ("human", ASKED),
        *(("gpt", THOUGHT), ("function_call", json.dumps({"name": "lock_state", "arguments": ARGUMENTS}))),
        *(("observation", RETURNED), ("gpt", ANSWER)),
    ),
    "calls in a list": conversation(
        *(("user", ASKED), ("assistant", THOUGHT), ("assistant", "[lock_state(lock=7)]")),
        *(("tool", RETURNED), ("assistant", ANSWER)),
    ),
    "the answer twice": {"input": ASKED, "messages": CHAT, "output": {"choices": [{"message": CHAT[-1]}]}},
    "the messages in the answer": {"inputs": {"messages": CHAT[:1]}, "outputs": {"messages": CHAT}},
    "requests with their responses": {
        "requests": [
            {
                "message": {"text": ASKED},
                "response": [{"value": THOUGHT}, {"kind": "toolInvocation", **TOOL}, {"value": ANSWER}],
            }
        ]
    },
    "a question, steps and an answer": {
        "query": ASKED,
        "answer": ANSWER,
        "agent_thoughts": [{"thought": THOUGHT, "tool": "lock_state", "tool_input": ARGUMENTS, "observation": RETURNED}],
    },
    "a task and steps": [
        {"system_prompt": "You keep the locks."},
        {"task": ASKED},
        {"step_number": 1, "model_output": THOUGHT, "tool_calls": [call("c", **FUNCTION)], "observations": RETURNED},
        {"step_number": 2, "model_output": ANSWER, "tool_calls": [], "observations": ""},
    ],
    "parts of the AI SDK": parts({"type": "tool-lock_state", "state": "output-available", **TOOL}),
    "its dynamic parts": {"id": "c", "messages": parts({"type": "dynamic-tool", **TOOL})},
    "its earlier parts": parts(
        {"type": "tool-invocation", "toolInvocation": {"state": "result", "args": ARGUMENTS, "result": RETURNED, **TOOL}}
    ),
    "parts with a state": {
        "info": {"id": "s"},
        "messages": [
            {"info": {"role": turn["role"]}, "parts": turn["parts"]}
            for turn in parts(
                {"type": "tool", "callID": "c", "tool": "lock_state", "state": {"input": ARGUMENTS, "output": RETURNED}}
            )
        ],
    },
    "the newest message first": {
        "object": "list",
        "data": [message | {"created_at": 1_767_225_600 - number} for number, message in enumerate(reversed(CHAT))],
    },
    "a tree of messages": {
        "mapping": {
            "a": {"id": "a", "message": None, "parent": None},
            "b": {"id": "b", "message": {"author": {"role": "user"}, "content": {"parts": [ASKED]}}, "parent": "a"},
            "x": {"id": "x", "message": {"author": {"role": "assistant"}, "content": {"parts": ["No."]}}, "parent": "b"},
            "c": {"id": "c", "message": CHAT[1], "parent": "b"},
            "d": {"id": "d", "message": CHAT[2], "parent": "c"},
            "e": {"id": "e", "message": CHAT[3], "parent": "d"},
        }
    },
    "steps with results of calls": {
        "task": ASKED,
        "agent_steps": [
            {
                "llm_response": {"content": THOUGHT},
                "tool_calls": [{"call_id": "c", **FUNCTION}],
                "tool_results": [{"call_id": "c", "success": True, "result": RETURNED}],
            }
        ],
        "final_result": ANSWER,
    },
    "events with thoughts": [
        event("MessageEvent", "user", llm_message=user([text(ASKED)])),
        event("ActionEvent", "agent", thought=[text(THOUGHT)], action={"kind": "Lock"}, tool_call=CALLED, **OF_LOCK),
        event("ObservationEvent", "environment", observation={"content": [text(RETURNED)], "exit_code": 0}, **OF_LOCK),
        event("MessageEvent", "agent", llm_message=assistant([text(ANSWER)])),
    ],
    "parts of requests and responses": [
        {"kind": "request", "parts": [part("system-prompt", content="x"), part("user-prompt", content=ASKED)]},
        {"kind": "response", "parts": [part("text", content=THOUGHT), part("tool-call", args=ARGUMENTS, **OF_LOCK)]},
        {"kind": "request", "parts": [part("tool-return", content=RETURNED, **OF_LOCK)]},
        {"kind": "response", "parts": [part("text", content=ANSWER)]},
    ],
    "names of authors": {
        "messages": [
            {"source": "user", "type": "TextMessage", "content": ASKED},
            {"source": "keeper", "type": "TextMessage", "content": THOUGHT},
            {"source": "keeper", "type": "ToolCallRequestEvent", "content": [CALLED]},
            {"source": "keeper", "type": "ToolCallExecutionEvent", "content": [{"call_id": "c", "content": RETURNED}]},
            {"source": "keeper", "type": "TextMessage", "content": ANSWER},
        ]
    },
    "labels of roles": {
        "messages": [
            {"role": {"Label": "user"}, "items": [{"$type": "TextContent", "text": ASKED}]},
            {"role": {"Label": "assistant"}, "items": [text(THOUGHT)], "tool_calls": [call("c", **FUNCTION)]},
            {"role": {"Label": "tool"}, "items": [{"$type": "FunctionResultContent", "callId": "c", "result": RETURNED}]},
            {"role": {"Label": "assistant"}, "items": [{"$type": "TextContent", "text": ANSWER}]},
        ]
    },
    "capitals": [
        {"Role": {"Label": "user"}, "Items": [{"$type": "TextContent", "Text": ASKED}]},
        {
            "Role": "assistant",
            "Content": THOUGHT,
            "ToolCalls": [{"Id": "c", "Function": {"Name": "lock_state", "Arguments": ARGUMENTS}}],
        },
        {"Role": "tool", "Items": [{"$type": "FunctionResultContent", "CallId": "c", "Result": RETURNED}]},
        {"Role": "assistant", "Content": ANSWER},
    ],
    "roles of a memory": [
        {"role_at_backend": "user", "message": {"content": ASKED}},
        {"role_at_backend": "assistant", "message": {"content": THOUGHT}},
        {"role_at_backend": "assistant", "message": {"func_name": "lock_state", "args": ARGUMENTS, "tool_call_id": "c"}},
        {"role_at_backend": "function", "message": {"func_name": "lock_state", "result": RETURNED, "tool_call_id": "c"}},
        {"role_at_backend": "assistant", "message": {"content": ANSWER}},
    ],
    "results by the ids of calls": {
        "messages": [
            {"User": {"content": [{"Text": ASKED}]}},
            {
                "Agent": {
                    "content": [{"Text": THOUGHT}, {"ToolUse": {"id": "c", "name": "lock_state", "input": ARGUMENTS}}],
                    "tool_results": {"c": {"tool_use_id": "c", "tool_name": "lock_state", "content": {"Text": RETURNED}}},
                }
            },
            {"Agent": {"content": [{"Text": ANSWER}]}},
        ]
    },
    "numbers in the keys": {
        "id": "001_002_003",
        "specified_task": ASKED,
        "message_10": {"role_name": "Keeper", "role_type": "RoleType.ASSISTANT", "role": "user", "content": ANSWER},
        **{f"message_{number}": turn for number, turn in enumerate(CHAT[1:3], 1)},
        "num_messages": 3,
    },
    "a role that is a tool's name": {"messages": [*CHAT[:2], {"role": "lock_state", "content": RETURNED}, CHAT[3]]},
    "a role that nobody knows": {"messages": [*CHAT, {"role": "session_meta"}]},
    "XML": {
        "messages": exchange(
            assistant(f"{THOUGHT}\n<function=lock_state>\n<parameter=lock>7</parameter>\n</function>"),
            user(f"OBSERVATION:\n{RETURNED}"),
        )
    },
    "elements that results name": [
        user(f"<task>\n{ASKED}\n</task>\n<environment_details>\nx\n</environment_details>"),
        assistant(f"{THOUGHT}\n<lock_state>\n<lock>7</lock>\n</lock_state>"),
        user(f"[lock_state for '7'] Result:\n{RETURNED}"),
        assistant(ANSWER),
    ],
    "ReAct": [
        user(ASKED),
        assistant(f"Thought: {THOUGHT}\nAction: lock_state\nAction Input: {json.dumps(ARGUMENTS)}\nObservation: made up"),
        user(f"Observation: {RETURNED}"),
        assistant(f"Final Answer: {ANSWER}"),
    ],
    "BeeAI": [
        user(ASKED),
        assistant(
            f"Thought: {THOUGHT}\nFunction Name: lock_state\nFunction Input: {json.dumps(ARGUMENTS)}\n"
            f"Function Output: {RETURNED}\n"
        ),
        assistant(f"Final Answer: {ANSWER}"),
    ],
    "DSPy": [
        user(ASKED),
        assistant(
            f"[[ ## next_thought ## ]]\n{THOUGHT}\n\n[[ ## next_tool_name ## ]]\nlock_state\n\n"
            f"[[ ## next_tool_args ## ]]\n{json.dumps(ARGUMENTS)}\n\n[[ ## completed ## ]]"
        ),
        {"role": "tool", "content": RETURNED},
        assistant(f"[[ ## answer ## ]]\n{ANSWER}\n\n[[ ## completed ## ]]"),
    ],
    "Letta": [
        {"message_type": "user_message", "content": ASKED},
        {"message_type": "reasoning_message", "reasoning": THOUGHT},
        {"message_type": "tool_call_message", "tool_call": {**FUNCTION, "tool_call_id": "c"}},
        {"message_type": "tool_return_message", "tool_return": RETURNED, "tool_call_id": "c"},
        {"message_type": "assistant_message", "content": ANSWER},
    ],
}


@pytest.mark.parametrize("name", ENVELOPES)
def test_turns_are_found_at_any_place(name: str) -> None:
    (trace,) = converted("", ENVELOPES[name])
    assert trace["task"]["objective"] == ASKED
    steps = [(kind, *names, content.replace('"7"', "7")) for kind, *names, content in steps_in(trace)]
    assert steps == STEPS
    assert trace["outcome"]["result_summary"] == ANSWER


@pytest.mark.parametrize(
    "step", [lambda action: {"action": action, "observation": RETURNED}, lambda action: [action, RETURNED]]
)
def test_steps_that_hold_their_actions_are_read(step: Callable[[Json], object]) -> None:
    action = {"tool": "lock_state", "toolInput": ARGUMENTS, "toolCallId": "c", "log": ""}
    run = {"chatInput": ASKED, "output": ANSWER, "intermediateSteps": [step(action)]}
    for source in (run, {"json": run}):
        assert steps_of("", source) == STEPS[1:]


def test_answer_may_be_an_artifact_and_the_first_message_an_instruction() -> None:
    task = {"history": [{"role": "user", "parts": [{"kind": "text", "text": ASKED}]}], "status": {"state": "completed"}}
    assert steps_of("", task | {"artifacts": [{"parts": [{"kind": "text", "text": ANSWER}]}]}) == STEPS[-1:]
    (trace,) = converted("", [user("You are a keeper."), assistant("Ok."), user(ASKED), assistant(ANSWER)])
    assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, STEPS[-1:])


def test_fenced_commands_are_calls_if_the_next_messages_say_what_they_returned() -> None:
    run = [user("Do it."), assistant("I look.\n```bash\nls\n```"), user("<returncode>1</returncode>\n<output>\nno\n</output>")]
    twice = [kind for kind, *_ in steps_of("", [*run, *run[1:]])]
    assert twice == ["thought", "tool_call", "observation", "error_recovery", "tool_call", "observation"]
    explained = [user("How?"), assistant("So:\n```bash\nls\n```"), user("Thanks."), assistant("Gladly.")]
    assert [kind for kind, *_ in steps_of("", explained)] == ["thought", "observation", "thought"]


def test_action_of_react_may_have_its_input_in_brackets() -> None:
    acted = assistant("Thought: I look.\nAction: tide_table[Esbjerg]")
    (trace,) = converted("", [user(ASKED), acted, user("Observation: 04:12"), assistant(f"Final Answer: {ANSWER}")])
    assert [kind for kind, *_ in steps_in(trace)] == ["thought", "tool_call", "observation", "thought"]
    assert trace["steps"][1] | {"content": ""} == {
        "step_id": 1,
        "type": "tool_call",
        "content": "",
        "tool": {"name": "tide_table"},
        "input": {"arguments": "Esbjerg"},
    }
    assert trace["outcome"]["result_summary"] == ANSWER


def test_all_sections_with_one_name_are_kept() -> None:
    sections = "".join(f"[[ ## reasoning ## ]]\n{part}\n" for part in ("It is late.", "It is dark."))
    thoughts = [content for *_, content in steps_of("", [user(ASKED), assistant(f"{sections}[[ ## answer ## ]]\n{ANSWER}")])]
    assert thoughts == ["It is late.", "It is dark.", ANSWER]
    quoted = f"It writes:\n{sections}"
    assert [content for *_, content in steps_of("", [user(ASKED), assistant(quoted)])] == [quoted]


def test_call_in_the_text_of_an_agent_that_calls_otherwise_is_a_text() -> None:
    quoted = assistant(f"It writes {TAGGED}")
    assert [kind for kind, *_ in steps_of("", [*CHAT, quoted])].count("tool_call") == 1


@pytest.mark.parametrize(
    "at",
    [
        *("2026-01-01T00:00:00Z", 1_767_225_600, 1_767_225_600_000, "1767225600", "2026-01-01", "1767225600.0"),
        *("20260101", "2026-01-01t00:00:00z", "2026-01-01 00:00:00 "),
    ],
)
@pytest.mark.parametrize("key", ["created_at", "created", "createTime", "timestamp"])
def test_time_is_read_in_any_field_and_form(key: str, at: object) -> None:
    (trace,) = converted("", {"messages": CHAT, key: at})
    assert trace["metadata"]["created_at"] in ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00+00:00")


@pytest.mark.parametrize("duration", [12.5, "12", 90_000, 20_260_101])
def test_small_number_is_no_time(duration: object) -> None:
    (trace,) = converted("", {"messages": CHAT, "time": duration, "created": 1_767_225_600})
    assert trace["metadata"]["created_at"] == "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    "failed",
    [
        {"role": "tool", "tool_call_id": "c", "content": "", "error": {"type": "timeout", "message": "It took too long."}},
        {
            "kind": "request",
            "parts": [part("retry-prompt", tool_name="lock_state", content="It took too long.", tool_call_id="c")],
        },
    ],
)
def test_error_beside_a_result_is_one(failed: Json) -> None:
    (trace,) = converted("", [*CHAT[:2], failed, assistant(None, call("d", **FUNCTION)), result("d", RETURNED)])
    assert trace["steps"][2]["content"] == "It took too long."
    assert trace["steps"][3]["type"] == "error_recovery"


def test_roles_of_a_chat_between_agents_do_not_depend_on_whose_copy_it_is() -> None:
    answered = {
        "role": "tool",
        "name": "person",
        "tool_responses": [{"tool_call_id": "c", "content": RETURNED}],
        "content": RETURNED,
    }
    turns = [user(ASKED) | {"name": "person"}, assistant(THOUGHT, call("c", **FUNCTION)), answered, assistant(ANSWER)]
    turns += [user("") | {"name": "person"}, assistant("TERMINATE")]
    turns = [turn if "name" in turn else turn | {"name": "keeper"} for turn in turns]
    # The copy of the agent that asks shows its own turns as the assistant's and the others as the user's; calls keep their
    # role.
    swapped = {"user": "assistant", "assistant": "user"}
    askers = [turn if turn.get("tool_calls") else turn | {"role": swapped.get(turn["role"], "tool")} for turn in turns]
    toolless = [turn for turn in askers if turn["role"] != "tool" and not turn.get("tool_calls")]
    for source in (
        {"chat_history": turns},
        {"chat_history": askers, "summary": ANSWER, "cost": {}},
        askers,
        {"messages": askers},
    ):
        (trace,) = converted("openai", source)
        assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, STEPS)
        assert trace["outcome"]["result_summary"] == ANSWER
    (trace,) = converted("openai", {"chat_history": toolless, "summary": ANSWER, "human_input": []})
    assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, [("thought", ANSWER)])
    greeting = [assistant("Hello, I am the keeper.") | {"name": "keeper"}, user(ASKED) | {"name": "Ann"}, assistant(ANSWER)]
    for holder in ({"messages": greeting}, {"dialogue": greeting, "cost": 0.1}):
        (trace,) = converted("openai", holder)
        assert trace["task"]["objective"] == ASKED


def test_conversations_in_a_list_are_runs_and_what_is_none_is_refused() -> None:
    windy = [user("Is it windy?"), assistant("Very.")]
    assert len(converted("", {"simulations": [{"messages": CHAT}, {"messages": windy}]})) == 2
    for foreign in ({"rows": [{"name": "a", "note": "b"}]}, [{"x": 1}], {"tools": [{"name": "f", "parameters": {}}]}):
        assert len(converted_and_refused("", [foreign])[1]) == 1


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("<environment_context>\n  <cwd>/x</cwd>\n</environment_context>\nIs it open?", "Is it open?"),
        ("Is it open?\n<system-reminder>Be brief.</system-reminder>", "Is it open?"),
        ("<user_query>\nIs it open?\n</user_query>", "Is it open?"),
        ("<b>Is it open?</b>", "<b>Is it open?</b>"),
        ("<system-reminder>Is it open?", "<system-reminder>Is it open?"),
    ],
)
def test_objective_is_the_text_that_the_user_wrote(text: str, own: str) -> None:
    (trace,) = converted("", [user(text), assistant(ANSWER)])
    assert trace["task"]["objective"] == own


def test_events_among_the_messages_of_the_user_are_left_out() -> None:
    heartbeat, asked = ({"type": kind, "message": text} for kind, text in (("heartbeat", "x"), ("user_message", ASKED)))
    (trace,) = converted("", [user(json.dumps(heartbeat)), user(json.dumps(asked)), assistant(ANSWER)])
    assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, [("thought", ANSWER)])
