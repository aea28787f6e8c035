"""Real runs of agents as Langfuse exports them: each becomes the trace that a person reads in it."""

import json
from collections import Counter
from typing import Any, Final

import pytest

from tests.support.converting import converted
from tests.support.paths import EXPORTS

pytestmark = pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"there are no real exports in {EXPORTS}")

EXPECTED: Final[dict[str, Any]] = json.loads((EXPORTS / "expected.json").read_text("utf-8")) if EXPORTS.is_dir() else {}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_real_run_becomes_what_a_person_reads_in_it(name: str) -> None:
    (trace,) = converted("langfuse", json.loads((EXPORTS / name).read_text("utf-8")))
    expected, objective = EXPECTED[name], trace["task"]["objective"]
    assert expected["objective_contains"] in objective
    assert not objective.startswith(("{", "[", '"', "system:")), "the request alone"
    assert (expected["result_contains"] or "") in trace["outcome"]["result_summary"]
    steps = trace["steps"]
    if expected["tools"] is not None:
        calls = Counter(step["tool"]["name"] for step in steps if "tool" in step)
        optional = {tool.removesuffix("?") for tool in expected["tools"] if tool.endswith("?")}
        expected_calls = Counter(tool for tool in expected["tools"] if not tool.endswith("?"))
        assert Counter({tool: count for tool, count in calls.items() if tool not in optional}) == expected_calls
        # A call of what ends the run, as ``final_result``, has no result.
        assert sum(step["type"] == "observation" for step in steps) >= expected_calls.total()
    contents = [step["content"] for step in steps]
    assert len(contents) == len(set(contents)), "nothing twice"
    assert not any('"parameters"' in content for content in contents), "no definition of a tool"
