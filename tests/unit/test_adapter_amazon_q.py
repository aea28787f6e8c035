"""Conversations that the command lines of Amazon Q and Kiro save become traces."""

from typing import Any, Final

import pytest

from tests.support.converting import converted, steps_in

Json = dict[str, Any]


def called(content: str, call_id: str, **arguments: str) -> Json:
    use = {"id": call_id, "name": "execute_bash", "orig_name": "execute_bash", "args": arguments, "orig_args": arguments}
    return {"ToolUse": {"message_id": "m", "content": content, "tool_uses": [use]}}


def returned(call_id: str, status: str, *content: Json) -> Json:
    return {"tool_use_results": [{"tool_use_id": call_id, "content": list(content), "status": status}]}


TURNS: Final[list[tuple[Json, Json]]] = [
    ({"Prompt": {"prompt": "When is high water?"}}, called("I ask the table.", "t1", command="tide")),
    ({"ToolUseResults": returned("t1", "Success", {"Json": {"exit_status": "127"}})}, called("", "t2", command="tides")),
    (
        {"CancelledToolUses": {"prompt": "No, look at tides.txt.", **returned("t2", "Error", {"Text": "cancelled"})}},
        called("", "t3", command="cat tides.txt"),
    ),
    (
        {"ToolUseResults": returned("t3", "Success", {"Json": {"exit_status": "0", "stdout": "04:12"}})},
        {"Response": {"message_id": "m", "content": "At 04:12."}},
    ),
]
PUT: Final[Json] = {"additional_context": "", "env_context": {"env_state": {}}, "images": None}
SAVED: Final[Json] = {
    "conversation_id": "q-7",
    "next_message": None,
    "history": [[{"content": put, **PUT}, answer] for put, answer in TURNS],
    "transcript": ["> When is high water?", "At 04:12."],
    "tools": {"native___": []},
}


@pytest.mark.parametrize(
    "history",
    [SAVED["history"], [{"user": put, "assistant": answer, "request_metadata": {}} for put, answer in SAVED["history"]]],
    ids=["pairs", "objects"],
)
def test_saved_conversation_is_a_run(history: list[object]) -> None:
    (trace,) = converted("", SAVED | {"history": history})
    assert (trace["id"], trace["metadata"]["framework"]) == ("kp:trace:amazon-q:q-7", "amazon-q")
    assert trace["task"]["objective"] == "When is high water?"
    assert steps_in(trace) == [
        ("thought", "I ask the table."),
        ("tool_call", "execute_bash", 'execute_bash({"command": "tide"})'),
        ("observation", '{"exit_status": "127"}'),
        ("error_recovery", "execute_bash", 'execute_bash({"command": "tides"})'),
        ("observation", "cancelled"),
        ("observation", "No, look at tides.txt."),
        ("error_recovery", "execute_bash", 'execute_bash({"command": "cat tides.txt"})'),
        ("observation", '{"exit_status": "0", "stdout": "04:12"}'),
        ("thought", "At 04:12."),
    ]


REFUSED: Final = {"amazon-q": [(SAVED | {"history": [SAVED["history"][0], [TURNS[3][1]]]}, "history.1")]}
EXAMPLES: Final[dict[str, object]] = {"amazon-q": SAVED}
