"""The names that ``import kp_scorer`` provides, and the cost of importing them."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final, get_args, get_type_hints

import kp_scorer
import pytest
from kp_scorer import Decision, ReasoningTrace, Settings

from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S

ALIASES: Final = {"Reason", "Submitted", "Trace"}
HEAVY: Final = {"celery", "kombu", "redis", "openvino", "torch", "transformers", "numpy"}


def test_traces_errors_and_rows_are_light() -> None:
    code = "from kp_scorer import InvalidTrace, ReasoningTrace, ServiceUnavailable, TraceDead, rows"
    printing = f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", printing], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert not set(json.loads(done.stdout)) & HEAVY


@pytest.mark.parametrize("name", kp_scorer.__all__)
def test_every_name_resolves(name: str) -> None:
    value = getattr(kp_scorer, name)
    assert name in ALIASES or (value.__name__ == name and value.__module__.startswith("kp_scorer."))


def types_in(hint: Any) -> Iterator[type]:
    """Yield the classes of an annotation, including nested ones."""
    if isinstance(hint, type):
        yield hint
    for argument in get_args(hint):
        yield from types_in(argument)


def test_signatures_use_only_types_of_the_face() -> None:
    face = [getattr(kp_scorer, name) for name in kp_scorer.__all__]
    callables: list[Any] = [value for value in face if inspect.isfunction(value)]
    for value in filter(inspect.isclass, face):
        if not issubclass(value, Decision | ReasoningTrace | Settings):
            callables += [value, *(method for name, method in inspect.getmembers(value, callable) if not name.startswith("_"))]
    used = {
        each
        for call in callables
        if getattr(call, "__module__", "").startswith("kp_scorer")
        for hint in get_type_hints(call.__init__ if inspect.isclass(call) else call).values()
        for each in types_in(hint)
    }
    assert Settings in used
    assert {each for each in used if each.__module__.startswith("kp_scorer")} <= {
        each for each in face if inspect.isclass(each)
    }


def test_the_api_page_shows_every_name_once() -> None:
    documented = re.findall(r"^::: kp_scorer\.(\w+)$", (REPOSITORY / "worker" / "API.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(documented) == sorted(kp_scorer.__all__)
