"""SWE-agent's trajectories as traces."""

from typing import Any, Final

import pytest

from tests.support.converting import converted, refused_fields, steps_in, steps_of

Json = dict[str, Any]


def step(thought: str, action: str, observation: str, **more: object) -> Json:
    response = f"{thought}\n```\n{action}\n```"
    return {"thought": thought, "action": action, "observation": observation, "response": response, "state": {}, **more}


HISTORY: Final = [
    {"role": "system", "content": "SETTING: you work in a shell.", "agent": "main", "message_type": "system_prompt"},
    {"role": "user", "content": "Here is how somebody else did it.", "is_demo": True},
    {"role": "user", "content": "ISSUE: rounding() loses a cent.", "agent": "main", "message_type": "observation"},
]
TRAJECTORY: Final = [
    step("First I look around.", "ls -F\n", "money.py  tests/", execution_time=0.25),
    step("I run the tests.", "python -m pytest -q\n", "Traceback (most recent call last):\nModuleNotFoundError: pytest"),
    step("It has to be installed.", "pip install pytest\n", "installed"),
    step("Done.", "submit\n", "diff --git a/money.py b/money.py"),
]
RUN: Final = {
    "environment": "main",
    "trajectory": TRAJECTORY,
    "history": HISTORY,
    "info": {"exit_status": "submitted", "submission": "diff --git a/money.py b/money.py", "model_stats": {"api_calls": 4}},
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
        ("error_recovery", "It has to be installed."),
        ("tool_call", "pip", "pip install pytest\n"),
        ("observation", "installed"),
        ("thought", "Done."),
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
    (trace,) = converted("sweagent", RUN | {"history": [*HISTORY, message]})
    assert trace["steps"][1]["tool"] == {"name": "bash"}
    assert trace["steps"][1]["input"] == {"command": "ls -F\n"}
    assert trace["steps"][1]["content"] == "ls -F\n"
    assert trace["steps"][4]["tool"] == {"name": "python"}


@pytest.mark.parametrize("key", ["query", "messages"])
def test_without_a_history_the_first_input_of_the_model_is_the_objective(key: str) -> None:
    steps = [TRAJECTORY[0] | {key: HISTORY}, *TRAJECTORY[1:]]
    (trace,) = converted("sweagent", {"trajectory": steps, "info": {}})
    assert trace["task"]["objective"] == "ISSUE: rounding() loses a cent."
    assert trace["outcome"]["result_summary"] == "Done."


def test_step_without_a_command_is_a_thought() -> None:
    assert steps_of("sweagent", RUN | {"trajectory": [{"response": "I stop.", "action": "", "observation": None}]}) == [
        ("thought", "I stop.")
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"trajectory": None}, "trajectory"),
        ({"trajectory": {}}, "trajectory"),
        ({"trajectory": []}, "$"),
        ({"trajectory": [*TRAJECTORY, 5]}, "trajectory.4"),
        ({"trajectory": [TRAJECTORY[0] | {"action": ["ls"]}]}, "trajectory.0.action"),
        ({"trajectory": [TRAJECTORY[0] | {"execution_time": -1}]}, "trajectory.0.execution_time"),
        ({"history": [{"role": "system", "content": "x"}]}, "$"),
        ({"history": 5}, "history"),
        ({"info": {"submission": 5}}, "info.submission"),
        ({"trajectory": [step("a", "cat big", "x" * 100_001)]}, "trajectory.0"),
    ],
)
def test_errors_name_the_place(change: Json, field: str) -> None:
    assert refused_fields("sweagent", RUN | change, RUN) == [(1, field)]
