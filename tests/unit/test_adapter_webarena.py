"""Trajectories of agents in a browser become traces in which each step has what the agent saw before it acted."""

from typing import Any, Final

import pytest

from tests.support.converting import converted, converted_and_refused, steps_in

Json = dict[str, Any]

STEPS: Final[list[Json]] = [
    {"url": "http://shop.example/", "observation": "[12] link 'Ropes'", "reason": "I open them.", "action": "click [12]"},
    {"url": "http://shop.example/ropes", "observation": "[30] 4 EUR", "reason": "", "action": "stop [4 EUR]"},
]
TAKING_TURNS: Final[list[Json]] = [
    {"observation": {"text": "[12] link 'Ropes'", "image": [0]}, "info": {}},
    {"action_type": 6, "element_id": "12", "raw_prediction": "I open them. ```click [12]``` It opens."},
    {"observation": {"text": "[30] 4 EUR", "image": [0]}, "info": {}},
    {"action_type": 17, "answer": "4 EUR", "raw_prediction": "```stop [4 EUR]```"},
]
RUN: Final[Json] = {"task_id": 3, "intent": "What does the cheapest rope cost?", "trajectory": STEPS}


@pytest.mark.parametrize("steps", [STEPS, TAKING_TURNS], ids=["steps with both", "states and actions in turn"])
@pytest.mark.parametrize("key", ["intent", "objective", "task"])
def test_an_observation_comes_before_the_action_of_its_step(key: str, steps: list[Json]) -> None:
    (trace,) = converted("", {key: RUN["intent"], "trajectory": steps})
    assert trace["task"]["objective"] == RUN["intent"]
    assert steps_in(trace) == [
        ("observation", "[12] link 'Ropes'"),
        ("thought", "I open them."),
        ("tool_call", "click", "click [12]"),
        ("observation", "[30] 4 EUR"),
        ("tool_call", "stop", "stop [4 EUR]"),
    ]
    assert trace["outcome"]["result_summary"] == "4 EUR"


def test_trajectory_without_its_task_is_refused_with_where_it_may_be() -> None:
    traces, (refused,) = converted_and_refused("", [{"trajectory": STEPS}])
    assert traces == []
    assert "expected the task of the agent as intent, objective" in str(refused)


EXAMPLES: Final[dict[str, object]] = {"webarena": RUN}
