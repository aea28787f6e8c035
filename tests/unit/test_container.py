"""The Dockerfile: what it copies is there, what it runs is nobody's shell, and whoever it runs as is not root.

That the image works is seen by `make image`, which takes minutes.
"""

import json
import re
import tomllib
from typing import Any, Final, NamedTuple

import pytest
from kp_scorer.settings import Settings, as_environment

from tests.support.paths import REPOSITORY

TARGETS: Final = ("cpu", "gpu")


class Instruction(NamedTuple):
    """One instruction of a stage."""

    name: str
    arguments: str


class Stage(NamedTuple):
    """A stage, and what it begins with: another one, or an image."""

    base: str
    instructions: list[Instruction]


def stages() -> dict[str, Stage]:
    """The stages of the Dockerfile by name."""
    text = (REPOSITORY / "deploy" / "Dockerfile").read_text("utf-8")
    found: dict[str, Stage] = {}
    begun: list[Instruction] = []
    for name, arguments in re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE):
        if name == "FROM":
            base, stage = re.fullmatch(r"(\S+) AS (\S+)", arguments).groups()  # type: ignore[union-attr]
            begun = []
            found[stage] = Stage(base, begun)
        begun.append(Instruction(name, arguments))
    return found


def last(target: str, name: str) -> str:
    """The arguments of the last instruction of this name that a target obeys."""
    all_stages = stages()
    given = [each.arguments for each in all_stages[target].instructions if each.name == name]
    return given[-1] if given else last(all_stages[target].base, name)


def variables(target: str) -> dict[str, str]:
    """What the image sets for the process."""
    all_stages = stages()
    inherited = variables(all_stages[target].base) if all_stages[target].base in all_stages else {}
    given = [pair for each in all_stages[target].instructions if each.name == "ENV" for pair in each.arguments.split()]
    return inherited | dict(pair.split("=", 1) for pair in given)


def from_the_checkout() -> set[str]:
    """What is copied from the checkout, and not from another stage."""
    copies = [each.arguments.split() for stage in stages().values() for each in stage.instructions if each.name == "COPY"]
    return {path for words in copies if not words[0].startswith("--from=") for path in words[:-1]}


def test_what_is_copied_is_there_and_is_let_in() -> None:
    let_in = re.findall(r"^!(.+)$", (REPOSITORY / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert from_the_checkout() == set(let_in)
    assert [path for path in let_in if not (REPOSITORY / path).exists()] == []


def test_the_last_stage_is_the_one_for_a_cpu() -> None:
    assert list(stages())[-1] == "cpu"


@pytest.mark.parametrize("target", TARGETS)
def test_the_worker_is_the_process_itself_and_gets_its_signals(target: str) -> None:
    started: list[Any] = [*json.loads(last(target, "ENTRYPOINT")), *json.loads(last(target, "CMD"))]
    assert started == ["kp-scorer", "worker"]


@pytest.mark.parametrize("target", TARGETS)
def test_whoever_it_runs_as_is_not_root_and_is_known_to_be_so_by_a_number(target: str) -> None:
    user, group = map(int, last(target, "USER").split(":"))
    assert user > 0
    assert group > 0


@pytest.mark.parametrize("target", TARGETS)
def test_the_settings_that_it_brings_exist(target: str) -> None:
    brought = {name for name in variables(target) if name.startswith("KP_")}
    assert brought
    assert brought <= set(as_environment(Settings()))


def test_the_groups_of_dependencies_that_it_installs_exist() -> None:
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    texts = [each[1] for stage in stages().values() for each in stage.instructions]
    named = {group for text in texts for groups in re.findall(r"'\.\[([\w,-]+)]'", text) for group in groups.split(",")}
    assert named == {"openvino", "otel-worker", "embedding", "torch"}
    assert named <= set(known)


def test_no_index_and_no_registry_is_named() -> None:
    assert "://" not in (REPOSITORY / "deploy" / "Dockerfile").read_text("utf-8")
    assert [stage.base for stage in stages().values() if stage.base not in stages()] == ["${BASE}"]
