"""A run becomes a chat with its turns as they were, the system's texts and the tools' definitions, whatever recorded them."""

import json
from typing import Any

import pytest
from kp_scorer.adapters import ConvertedRun, Converter, SuppliedFields
from kp_scorer.adapters.building import Run
from kp_scorer.adapters.chat import Chat, chat_of, chat_of_trace
from kp_scorer.limits import Limits

from tests.support.builders import make_trace
from tests.unit.test_adapter_openai import assistant
from tests.unit.test_adapter_otel import event, export, span, tool

SUPPLIED = SuppliedFields(0.9, "tides", "private", "private", success=True, created_at="2026-01-01T00:00:00Z")
SCHEMA = {"type": "object", "properties": {"port": {"type": "string"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "tide", "description": "When", "parameters": SCHEMA}}


def chat(*sources: Any) -> Chat:
    return chat_of(run_of(*sources))


def run_of(*sources: Any, limits: Limits | None = None) -> Run:
    converter = Converter(SUPPLIED, limits or Limits())
    results = [result for number, source in enumerate(sources, 1) for result in converter.feed(number, source)]
    results += [*converter.end_file(), *converter.end()]
    assert len(results) == 1
    assert isinstance(results[0], ConvertedRun), results
    return results[0].run


Json = dict[str, Any]


def call(call_id: str, port: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "tide", "arguments": json.dumps({"port": port})}}


MESSAGES: list[Json] = [
    {"role": "system", "content": "Never guess.\n"},
    {"role": "user", "content": "When is high water at Ribe and Esbjerg?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [call("a", "Ribe"), call("b", "Esbjerg")]},
    {"role": "tool", "tool_call_id": "b", "content": "07:15"},
    {"role": "tool", "tool_call_id": "a", "content": "06:40"},
    {"role": "assistant", "content": "06:40 and 07:15."},
    {"role": "user", "content": "  And tomorrow?"},
    {"role": "assistant", "content": "Later."},
]


def test_a_chat_comes_back_as_it_was_with_its_system_text_and_its_tools() -> None:
    read = chat({"messages": MESSAGES, "tools": [TOOL]})
    named = [message | {"name": "tide"} if message["role"] == "tool" else message for message in MESSAGES]
    assert read == Chat(named, [TOOL])


def result(call_id: str, content: str) -> Json:
    return {"role": "tool", "content": content} | ({"tool_call_id": call_id} if call_id else {})


def calls_of(*ids: str) -> Json:
    """Return an answer with calls of these ids; ``a2`` stands for another call with the id ``a``, of another tool."""
    tools = {"a2": {"id": "a", "type": "function", "function": {"name": "wind", "arguments": "{}"}}}
    return {"role": "assistant", "content": "", "tool_calls": [tools.get(each) or call(each, each) for each in ids]}


@pytest.mark.parametrize(
    ("turns", "answers"),
    [
        # A call is answered twice, while another has no result yet.
        ([calls_of("a", "b"), result("b", "1"), result("b", "2"), result("a", "3")], [("b", "1"), ("", "2"), ("a", "3")]),
        ([calls_of("a", "b"), result("a", "1"), result("a", "2")], [("a", "1"), ("", "2")]),
        # No call has the id of the first result.
        ([calls_of("a", "b"), result("x", "1"), result("a", "2")], [("b", "1"), ("a", "2")]),
        # An id comes again after a turn in which its call had no result.
        ([calls_of("a", "b"), result("b", "1"), calls_of("a2"), result("a", "2")], [("b", "1"), ("call_3", "2")]),
        ([calls_of("a"), MESSAGES[-2], calls_of("b"), result("", "1")], [("", "  And tomorrow?"), ("b", "1")]),
        # A result without a call is a message to the agent.
        ([result("", "The harbour opens."), calls_of("a"), result("a", "1")], [("", "The harbour opens."), ("a", "1")]),
        # Several calls with one id are answered in their order.
        ([calls_of("a", "a2"), result("a", "1"), result("a", "2")], [("a", "1"), ("call_2", "2")]),
        ([calls_of("a", "call_3", "a2"), result("call_3", "1")], [("call_3", "1")]),
    ],
)
def test_a_result_answers_the_call_of_its_id(turns: list[Json], answers: list[tuple[str, str]]) -> None:
    read = chat({"messages": [MESSAGES[1], *turns, MESSAGES[-1]]}).messages
    assert [(each.get("tool_call_id", ""), each["content"]) for each in read[1:] if each["role"] != "assistant"] == answers
    assert all((each["role"] == "tool") == ("tool_call_id" in each) for each in read)
    ids = [each["id"] for message in read for each in message.get("tool_calls", ())]
    assert len(ids) == len(set(ids)), ids


def test_the_result_of_a_step_answers_its_own_call() -> None:
    steps = [
        {"step_id": 0, "type": "tool_call", "tool": {"name": "first"}},
        {"step_id": 1, "type": "tool_call", "tool": {"name": "second"}, "output_summary": "of the second"},
        {"step_id": 2, "type": "observation", "content": "of the first"},
    ]
    read = chat_of_trace(make_trace(steps=steps)).messages
    assert [(each["name"], each["content"]) for each in read if each["role"] == "tool"] == [
        ("second", "of the second"),
        ("first", "of the first"),
    ]


def test_arguments_are_texts_that_parse_to_the_original_values() -> None:
    odd = assistant(None, call("a", "x") | {"function": {"name": "tide", "arguments": "{not"}})
    assert chat({"messages": [MESSAGES[1], odd, MESSAGES[-1]]}).messages[1]["tool_calls"][0]["function"]["arguments"] == "{not"
    block = {"type": "tool_use", "id": "t", "name": "tide", "input": {"z": 1, "a": [None, "ø"]}}
    read = chat({"messages": [MESSAGES[1], {"role": "assistant", "content": [block]}, MESSAGES[-1]]})
    assert read.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"z": 1, "a": [null, "ø"]}'


@pytest.mark.parametrize(
    "request_",
    [
        {
            "system": "Never guess.",
            "tools": [{"name": "tide", "description": "When", "input_schema": SCHEMA}],
            "messages": MESSAGES[1:],
        },
        {"system": [{"type": "text", "text": "Never guess."}], "tools": [TOOL], "messages": MESSAGES[1:]},
        {"instructions": "Never guess.", "tools": [TOOL["function"]], "input": MESSAGES[1:], "output": [MESSAGES[-1]]},
        {
            "systemInstruction": {"parts": [{"text": "Never guess."}]},
            "tools": [{"functionDeclarations": [TOOL["function"]]}],
            "contents": [{"role": "user", "parts": [{"text": "When?"}]}, {"role": "model", "parts": [{"text": "Now."}]}],
        },
    ],
)
def test_every_provider_says_its_system_text_and_its_tools_in_its_own_way(request_: dict[str, Any]) -> None:
    read = chat(request_)
    assert read.messages[0] == {"role": "system", "content": "Never guess."}
    assert read.tools == [TOOL]
    assert [message["role"] for message in read.messages].count("system") == 1


def recorded(question: Json, answer: Json, **more: Any) -> Json:
    """Return the span of a model's call, with more attributes and other fields."""
    messages = {"gen_ai.input.messages": json.dumps([question]), "gen_ai.output.messages": json.dumps([answer])}
    attributes = {"gen_ai.operation.name": "chat"} | messages | more.pop("attributes", {})
    return span("chat", 1, 2, attributes, **more)


@pytest.mark.parametrize(
    "attributes",
    [
        {
            "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Never guess."}]),
            "gen_ai.tool.definitions": json.dumps([TOOL]),
        },
        {"llm.input_messages.0.message.role": "system", "llm.input_messages.0.message.content": "Never guess."}
        | {"llm.tools.0.tool.json_schema": json.dumps(TOOL)},
        {"gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "Never guess."}
        | {
            f"llm.request.functions.0.{key}": json.dumps(each) if key == "parameters" else each
            for key, each in TOOL["function"].items()
        },
        *(
            {key: json.dumps({"model": "m", "messages": MESSAGES[:2], "tools": [TOOL]}).replace("guess.\\n", "guess.")}
            for key in ("gen_ai.prompt", "langfuse.observation.input", "mlflow.spanInputs", "gcp.vertex.agent.llm_request")
        ),
        # The AI SDK writes the tools as a list of JSON texts.
        {"ai.prompt": json.dumps({"system": "Never guess.", "prompt": MESSAGES[1]["content"]})}
        | {"ai.prompt.tools": [json.dumps(TOOL["function"] | {"type": "function"})]},
    ],
)
def test_attributes_of_spans_supply_the_system_text_and_the_tools(attributes: dict[str, str | list[str]]) -> None:
    read = chat(export(recorded(MESSAGES[1], MESSAGES[-1], attributes=attributes)))
    assert read.messages[0] == {"role": "system", "content": "Never guess."}
    assert read.tools == [TOOL]


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("has_model", [False, True])
def test_results_of_parallel_tools_belong_to_their_calls_in_whatever_order_they_end(has_ids: bool, has_model: bool) -> None:
    """Tool ``a`` begins first and ends last."""
    spans = [recorded(MESSAGES[1], MESSAGES[2 if has_model else -1])]
    for call_id, port, start_ms, end_ms in (("a", "Ribe", 3, 9), ("b", "Esbjerg", 4, 6)):
        used = {"gen_ai.tool.call.arguments": json.dumps({"port": port}), "gen_ai.tool.call.result": f"of {port}"}
        spans.append(tool("tide", start_ms, end_ms, call_id if has_ids else "", attributes=used))
    read = chat(export(*spans)).messages
    ports = {
        each["id"]: json.loads(each["function"]["arguments"])["port"] for turn in read for each in turn.get("tool_calls", ())
    }
    results = [(ports[each["tool_call_id"]], each["content"]) for each in read if each["role"] == "tool"]
    assert results == [("Esbjerg", "of Esbjerg"), ("Ribe", "of Ribe")]


@pytest.mark.parametrize(
    "system",
    [
        {"lc": 1, "type": "constructor", "id": ["langchain", "SystemMessage"], "kwargs": {"content": "Never guess."}},
        "ChatMessage(role=<MessageRole.SYSTEM: 'system'>, content=[{'type': 'text', 'text': 'Never guess.'}])",
        {"action": "system", "source": "agent", "args": {"content": "Never guess."}},
    ],
    ids=["constructor", "shown by Python", "event"],
)
def test_recorders_show_a_system_message_in_their_own_way(system: object) -> None:
    read = chat({"messages": MESSAGES[1:], "metadata": {"first": [system]}})
    assert read.messages[0] == {"role": "system", "content": "Never guess."}


def test_a_system_text_in_an_event_of_a_span_is_read() -> None:
    system = event("gen_ai.system.message", content='[{"text": "Never guess."}]')
    read = chat(export(recorded(MESSAGES[1], MESSAGES[-1], events=[system])))
    assert read.messages[0] == {"role": "system", "content": "Never guess."}


def test_no_argument_and_no_answer_is_taken_for_an_instruction() -> None:
    block = {"type": "tool_use", "id": "t", "name": "tide", "input": {"system": "no", "model": "no", "tools": [TOOL]}}
    read = chat({"messages": [MESSAGES[1], {"role": "assistant", "content": [block]}, MESSAGES[-1]]})
    assert read.tools == []
    assert [message["role"] for message in read.messages] == ["user", "assistant"]


def test_a_trace_is_a_chat_of_its_steps() -> None:
    steps = [
        {"step_id": 0, "type": "thought", "content": "I look."},
        {"step_id": 1, "type": "tool_call", "tool": {"name": "tide"}, "input": {"port": "Ribe"}, "output_summary": "06:40"},
        {"step_id": 2, "type": "observation", "content": "A gale warning"},
    ]
    read = chat_of_trace(make_trace(objective="When?", steps=steps))
    assert [(message["role"], message["content"]) for message in read.messages] == [
        ("user", "When?"),
        ("assistant", "I look."),
        ("tool", "06:40"),
        ("user", "A gale warning"),
        ("assistant", "done"),
    ]
    assert json.loads(read.messages[1]["tool_calls"][0]["function"]["arguments"]) == {"port": "Ribe"}
