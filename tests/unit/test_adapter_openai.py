"""Conversations of OpenAI become traces: chat messages, calls of functions old and new, items of the Responses API."""

import json
from typing import Any, Final

import pytest

from tests.support.converting import SUPPLIED, converted, steps_in, steps_of

Message = dict[str, Any]


def call(call_id: str, name: str, arguments: str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: object) -> Message:
    return {"role": "user", "content": content}


def assistant(content: object = None, *calls: Message) -> Message:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def result(call_id: str, content: object) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def item(kind: str, **fields: object) -> Message:
    """Return an item of the Responses API."""
    return {"type": kind, **fields}


def steps(*messages: object) -> list[tuple[str, ...]]:
    return steps_of("openai", list(messages))


TIDES: Final = [
    {"role": "system", "content": "You know the harbours of the North Sea."},
    user("When is high water in Esbjerg tomorrow?"),
    assistant(None, call("call_1", "tide_table", '{"port": "Esbjerg", "days": 1}')),
    result("call_1", '{"high": ["04:12", "16:40"]}'),
    assistant("At 04:12 and at 16:40."),
]


def test_chat_with_a_tool_call_is_a_trace() -> None:
    (trace,) = converted("openai", {"messages": TIDES})
    assert trace["task"] == {"objective": "When is high water in Esbjerg tomorrow?"}
    assert trace["steps"] == [
        {
            "step_id": 0,
            "type": "tool_call",
            "content": 'tide_table({"days": 1, "port": "Esbjerg"})',
            "tool": {"name": "tide_table"},
            "input": {"port": "Esbjerg", "days": 1},
        },
        {"step_id": 1, "type": "observation", "content": '{"high": ["04:12", "16:40"]}'},
        {"step_id": 2, "type": "thought", "content": "At 04:12 and at 16:40."},
    ]
    assert trace["outcome"] == {"result_summary": "At 04:12 and at 16:40.", "confidence": 0.7}
    assert trace["metadata"] == {
        "created_at": "2026-01-31T12:00:00Z",
        "task_domain": "code",
        "success": True,
        "visibility": "network",
        "privacy_level": "aggregated",
    }


REQUEST: Final = {"model": "some-model", "messages": TIDES[:-1]}
ANSWERS: Final = [{"index": 0, "finish_reason": "stop", "message": TIDES[-1]}, {"index": 1, "message": assistant("At noon.")}]


@pytest.mark.parametrize(
    "source",
    [
        TIDES,
        [TIDES],
        [{"messages": TIDES}],
        REQUEST | {"choices": ANSWERS[:1]},
        REQUEST | {"choices": ANSWERS},
        {"messages": TIDES, "choices": []},
        {"agent": {"messages": TIDES}},
    ],
    ids=[
        *("list", "list of lists", "list of objects"),
        *("answer beside its request", "first of two answers", "no answer", "component"),
    ],
)
def test_a_source_is_a_conversation_with_or_without_its_answer_or_a_list_of_several(source: object) -> None:
    (trace,) = converted("openai", source)
    (same,) = converted("openai", {"messages": TIDES})
    assert (trace["steps"], trace["outcome"]) == (same["steps"], same["outcome"])


MAIL: Final = [user("Any mail?"), assistant("Two messages.")]
POST: Final = [user("Any post?"), assistant("None.")]


@pytest.mark.parametrize(
    "source",
    [
        {"first": {"messages": MAIL}, "second": {"messages": POST}},
        {"first": MAIL, "second": POST},
        {"chats": [MAIL, POST], "model": "m"},
        {"messages": {"0": MAIL, "1": POST}, "reward": {"0": 1, "1": 0}},
        {"chat": {"0": json.dumps(MAIL), "1": json.dumps(POST)}},
        {"0": {"chat": MAIL}, "1": {"chat": POST}},
        {"columns": ["chat", "reward"], "index": [0, 1], "data": [[MAIL, 1], [POST, 0]]},
    ],
    ids=["objects by ids", "lists by ids", "list of lists", "columns", "columns of texts", "rows by number", "table"],
)
def test_object_of_several_runs_loses_none(source: object) -> None:
    assert [trace["task"]["objective"] for trace in converted("", source)] == ["Any mail?", "Any post?"]


@pytest.mark.parametrize(
    "source",
    [
        {"planner": MAIL, "writer": [MAIL[0], assistant("Two messages")]},
        {"before": {"messages": MAIL[:1]}, "after": {"messages": MAIL}},
        {"inputs": {"messages": MAIL[:1]}, "outputs": {"messages": MAIL[1:]}},
        {"agent": {"messages": MAIL}, "llm": {"replies": MAIL[1:]}},
    ],
    ids=["views of agents", "states", "request and response", "components"],
)
def test_object_of_several_views_of_a_run_is_one_run(source: object) -> None:
    assert [trace["task"]["objective"] for trace in converted("", source)] == ["Any mail?"]


def test_parallel_calls_come_before_their_results_and_images_are_left_out() -> None:
    calls = [call("call_a", "stock", '{"item": "rope"}'), call("call_b", "stock", '{"item": "sail"}')]
    stock = [*[{"type": "text", "text": text} for text in ("12", "in hall 3")], {"type": "image_url", "image_url": {}}]
    assert steps(
        *(user("Are rope and sail there?"), assistant("I look for both.", *calls)),
        *(result("call_a", stock), result("call_b", "0")),
        assistant([{"type": "text", "text": "Rope, yes."}, {"type": "refusal", "refusal": "Sail, no."}]),
    ) == [
        ("thought", "I look for both."),
        ("tool_call", "stock", 'stock({"item": "rope"})'),
        ("tool_call", "stock", 'stock({"item": "sail"})'),
        ("observation", "12\nin hall 3"),
        ("observation", "0"),
        ("thought", "Rope, yes.\nSail, no."),
    ]


def test_calls_in_one_list_with_one_id_are_several_if_their_arguments_differ() -> None:
    calls = [call("stock", "stock", f'{{"item": "{name}"}}') for name in ("rope", "sail")]
    history = [user("Are both there?"), assistant(None, *calls, calls[0])]
    # The history is recorded twice, the second time with other white space.
    again = [assistant(None, *(call("stock", "stock", f" {each['function']['arguments']}") for each in calls))]
    assert steps(
        *history, *again, result("stock", "yes"), result("stock", "yes"), result("stock", "yes"), assistant("Yes.")
    ) == [
        ("tool_call", "stock", 'stock({"item": "rope"})'),
        ("tool_call", "stock", 'stock({"item": "sail"})'),
        ("observation", "yes"),
        ("observation", "yes"),
        ("thought", "Yes."),
    ]


def test_blocks_with_one_id_are_several_calls_if_their_arguments_differ() -> None:
    called = [
        {"type": "tool_use", "id": "stock", "name": "stock", "input": {"item": name}} for name in ("rope", "sail", "rope")
    ]
    returned = [{"type": "tool_result", "tool_use_id": "stock", "content": "yes"}] * 2
    kinds = [kind for kind, *_ in steps(user("Are both there?"), assistant(called), user(returned), assistant("Yes."))]
    assert kinds == ["tool_call", "tool_call", "observation", "observation", "thought"]


def test_an_open_call_that_is_recorded_again_with_more_arguments_is_one_call() -> None:
    growing = [assistant(None, call("c", "stock", arguments)) for arguments in ("", '{"item": ', '{"item": "rope"}')]
    kinds = [kind for kind, *_ in steps(user("Is it there?"), *growing, result("c", "yes"), assistant("Yes."))]
    assert kinds == ["tool_call", "observation", "thought"]


CUSTOM: Final = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "uname -a"}}


@pytest.mark.parametrize(
    ("called", "arguments_text", "wrapped"),
    [
        (call("c", "f", '{"a": 1}'), '{"a": 1}', {"a": 1}),
        (call("c", "f", ""), "", {}),
        (call("c", "f", "[1, 2]"), "[1, 2]", {"arguments": [1, 2]}),
        (call("c", "f", '{"a": '), '{"a": ', {"arguments": '{"a": '}),
        (CUSTOM, "uname -a", {"arguments": "uname -a"}),
    ],
    ids=["an object", "none", "a list", "no JSON", "the text of a custom tool"],
)
def test_arguments_that_are_no_object_are_kept(called: Message, arguments_text: str, wrapped: object) -> None:
    (trace,) = converted("openai", [user("go"), assistant(None, called), result("c", "done")])
    first = {"step_id": 0, "type": "tool_call", "content": f"f({arguments_text})", "tool": {"name": "f"}, "input": wrapped}
    assert trace["steps"][0] == first
    assert trace["outcome"]["result_summary"] == "done"


def test_calls_of_one_chat_are_one_trace() -> None:
    again = [*TIDES, user("And the day after?"), assistant("At 05:01.")]
    renumbered = [each | {"tool_calls": [call("fc_9", "tide_table", '{"days": 1, "port": "Esbjerg"}')]} for each in TIDES[2:3]]
    in_hull = [user("When is high water in Hull?"), assistant("At noon.")]
    logs = [
        {"messages": TIDES[:2], "choices": [{"message": TIDES[2]}]},
        {"messages": in_hull[:1], "choices": [{"message": in_hull[1] | {"refusal": None}}]},
        {"messages": TIDES[:4], "choices": [{"message": TIDES[4]}]},
        {"messages": [*TIDES[:2], *renumbered, *again[3:-1]], "choices": [{"message": again[-1]}]},
    ]
    chat, alone = converted("openai", *logs)[::-1]
    # The result is the same if the newest log comes first.
    assert sorted(trace["id"] for trace in converted("openai", *logs[::-1])) == sorted((chat["id"], alone["id"]))
    assert steps_in(chat) == steps_of("openai", again)
    assert steps_in(alone) == steps_of("openai", in_hull)


def test_chats_that_only_begin_alike_stay_several() -> None:
    beginning = [user("Good day."), assistant("Good day."), user("Is it windy?")]
    traces = converted(
        "openai", [*beginning, assistant("Yes.")], [*beginning, assistant("No.")], [*beginning, assistant("Yes.")]
    )
    assert [trace["outcome"]["result_summary"] for trace in traces].count("Yes.") == 2
    assert len(traces) == 3


def test_images_that_built_in_tools_make_are_left_out() -> None:
    image = "iVBORw0KGgo="
    plot = {"type": "image", "url": f"data:image/png;base64,{image}"}
    logs = {"type": "logs", "logs": "4.5 m"}
    items = [
        item("image_generation_call", id="ig_1", size="1024x1024", result=image),
        item("code_interpreter_call", id="ci_1", code="plot()", outputs=[plot, logs]),
        item("code_interpreter_call", id="ci_2", code="pass", outputs=None),
        item("local_shell_call", id="ls_1", action={"type": "exec"}, result="kept"),
        item("computer_call", id="cc_1", call_id="c", action={"type": "screenshot"}),
        item("computer_call_output", call_id="c", output={"type": "computer_screenshot", "image_url": plot["url"]}),
    ]
    (trace,) = converted("openai", [user("Draw the lock."), *items, assistant("It is drawn.")])
    screenshot = ("tool_call", "computer", 'computer({"action": {"type": "screenshot"}})')
    assert steps_in(trace)[-3:] == [screenshot, ("observation", ""), ("thought", "It is drawn.")]
    assert [step["input"] for step in trace["steps"][:-3]] == [
        {"size": "1024x1024"},
        {"code": "plot()", "outputs": [logs]},
        {"code": "pass", "outputs": None},
        {"action": {"type": "exec"}, "result": "kept"},
    ]
    assert image not in str(trace["steps"])


def test_request_and_response_of_the_responses_api() -> None:
    output = [
        item("web_search_call", id="ws_1", status="completed", action={"type": "search", "query": "bridge"}),
        item("mcp_call", id="m_1", server_label="town", name="notices", arguments="{}", output="none"),
        item("item_reference", id="x"),
        item("message", **assistant([{"type": "output_text", "text": "Not on Friday."}])),
    ]
    log = {"created_at": 1_767_225_600, "input": "Is the bridge open?", "output": output}
    (trace,) = converted("openai", log, supplied=SUPPLIED._replace(created_at=None))
    assert trace["metadata"]["created_at"] == "2026-01-01T00:00:00+00:00"
    assert trace["task"]["objective"] == "Is the bridge open?"
    assert steps_in(trace) == [
        ("tool_call", "web_search", 'web_search({"action": {"query": "bridge", "type": "search"}})'),
        ("tool_call", "notices", "notices({})"),
        ("observation", "none"),
        ("thought", "Not on Friday."),
    ]


def test_failed_mcp_call_is_an_error() -> None:
    mcp = item("mcp_call", id="m_1", name="notices", arguments="{}", error={"code": 504})
    shell = item("custom_tool_call", call_id="c", name="shell", input="ls")
    called = steps(item("message", **user("go")), mcp, shell, item("custom_tool_call_output", call_id="c", output="a b"))
    assert [kind for kind, *_ in called] == ["tool_call", "observation", "error_recovery", "observation"]


REFUSED: Final = {
    "openai": [
        (7, "$"),
        ({}, "$"),
        ({"messages": "x"}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": TIDES, "choices": "x"}, "choices"),
        ({"messages": TIDES, "choices": [{"text": "x"}]}, "choices.0.message"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "$"),
        ({"messages": [user(5)]}, "messages.0.content"),
        ({"messages": [*TIDES[:2], assistant(None, {})]}, "messages.2.tool_calls.0.function"),
        ({"messages": [*TIDES[:2], assistant(None, call("c", "", "{}"))]}, "messages.2.tool_calls.0.function.name"),
        ({"messages": TIDES[:2]}, "$"),
        ({"messages": TIDES[2:]}, "$"),
        ({"messages": TIDES[:3]}, "$"),
        ([TIDES, {"messages": [user({})]}], "1.messages.0.content"),
    ]
}
EXAMPLES: Final[dict[str, object]] = {"openai": {"messages": TIDES}}
