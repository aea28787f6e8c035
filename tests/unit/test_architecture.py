"""Who may import whom: a house of floors for the package, and tiers that share nothing but their support for its tests."""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

from tests.support.imports import Import, imports_in, modules_in
from tests.support.paths import REPOSITORY

PACKAGE: Final = REPOSITORY / "worker" / "kp_scorer"
TESTS: Final = REPOSITORY / "tests"

Floors = Sequence[frozenset[str]]


def floors_of(*names: str) -> Floors:
    """Floors from the bottom up, each named by its rooms."""
    return [frozenset(floor.split()) for floor in names]


FLOORS: Final = floors_of(
    "capacity characters errors files",
    "trace",
    "decision",
    "decoding",
    "adapters",
    "scoring",
    "novelty",
    "analysis",
    "spans",
    "settings",
    "logs local",
    "report",
    "embedding",
    "ledger",
    "broker",
    "decider",
    "offline client",
    "process",
    "app",
    "cli",
)
"""A room is a module or a package at the top of the package. It imports from itself and from the floors below."""

DATA: Final = frozenset({"samples", "reference"})
"""Rooms that hold files, and no code."""


def room_of(module: str) -> str:
    """The room of a module; empty for the public face, which is the package itself."""
    return module.partition(".")[2].partition(".")[0]


def homeless(root: Path, floors: Floors, data: frozenset[str] = frozenset()) -> list[str]:
    """Modules whose room is on no floor."""
    rooms = {"", *data.union(*floors)}
    return [f"{path.relative_to(root.parent)}: {name}" for name, path in modules_in(root).items() if room_of(name) not in rooms]


def upward(imports: Sequence[Import], floors: Floors) -> list[str]:
    """Imports of another room that is not on a lower floor; the public face is above all."""
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
    top = len(floors)
    return [
        str(each)
        for each in imports
        if (own := room_of(each.importer)) and own != (imported_room := room_of(each.imported))
        if floor_of.get(imported_room, top) >= floor_of.get(own, top)
    ]


def circle(imports: Sequence[Import]) -> list[str]:
    """The imports that make a circle of modules, one after the other; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for each in imports:
        graph.setdefault(each.importer, set()).add(each.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # Each is imported by the one after it.
        steps = list(zip(error.args[1][1:], error.args[1][:-1], strict=True))
        return [next(str(each) for each in imports if each[:2] == step) for step in reversed(steps)]
    return []


def test_every_module_is_in_a_room_with_a_floor() -> None:
    assert homeless(PACKAGE, FLOORS, DATA) == []


def test_no_room_imports_from_its_own_floor_or_a_higher_one() -> None:
    assert upward(imports_in(PACKAGE), FLOORS) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    # The public face imports when it is asked, and is imported by nobody, which the floors see to.
    assert circle([each for each in imports_in(PACKAGE) if room_of(each.importer)]) == []


@pytest.mark.parametrize("room", sorted(DATA))
def test_rooms_of_data_hold_no_code(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        assert path.name == "__init__.py"
        assert path.read_text("utf-8").count("\n") <= 1, f"{path} holds more than a docstring"


def test_tiers_of_tests_import_their_support_and_themselves_alone() -> None:
    sideways = [
        str(each)
        for each in imports_in(TESTS)
        if room_of(each.imported) != "support" and room_of(each.imported) != room_of(each.importer)
    ]
    assert sideways == []


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A package of three floors that is as it should be."""
    root = tmp_path / "house"
    for file, text in {
        "__init__.py": "from house.attic.lamp import light\n",
        "cellar.py": "import json\n",
        "hall/__init__.py": "from house.hall.door import Door\n",
        "hall/door.py": "from house import cellar\nfrom . import knob\n",
        "hall/knob.py": "",
        "attic/__init__.py": "",
        "attic/lamp.py": "def light():\n    from house.hall import Door\n",
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


HOUSE_FLOORS: Final = floors_of("cellar", "hall", "attic")


def complaints(house: Path) -> list[str]:
    imports = imports_in(house)
    within = [each for each in imports if room_of(each.importer)]
    return [*homeless(house, HOUSE_FLOORS), *upward(imports, HOUSE_FLOORS), *circle(within)]


def test_a_package_in_order_has_no_problems(house: Path) -> None:
    assert complaints(house) == []
    assert {(each.importer, each.imported) for each in imports_in(house)} == {
        ("house", "house.attic.lamp"),
        ("house.hall", "house.hall.door"),
        ("house.hall.door", "house.cellar"),
        ("house.hall.door", "house.hall.knob"),
        ("house.attic.lamp", "house.hall"),
    }


@pytest.mark.parametrize(
    "statement",
    [
        "import house.attic.lamp",
        "from house.attic import lamp",
        "from .attic import lamp",
        "def later():\n    from house.attic import lamp",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.attic import lamp",
    ],
)
def test_an_upward_import_is_found_on_any_line(house: Path, statement: str) -> None:
    (house / "cellar.py").write_text(statement)
    line = statement.count("\n") + 1
    assert upward(imports_in(house), HOUSE_FLOORS) == [f"house/cellar.py:{line}: house.cellar imports house.attic.lamp"]


def test_importing_the_public_face_from_inside_is_upward(house: Path) -> None:
    (house / "attic" / "lamp.py").write_text("from house import light\n")
    assert complaints(house) == ["house/attic/lamp.py:1: house.attic.lamp imports house"]


def test_rooms_on_one_floor_may_not_import_each_other(house: Path) -> None:
    problems = upward(imports_in(house), floors_of("cellar", "hall attic"))
    assert problems == ["house/attic/lamp.py:2: house.attic.lamp imports house.hall"]


def test_a_circle_within_a_room_is_found(house: Path) -> None:
    (house / "hall" / "knob.py").write_text("from house.hall.door import Door\n")
    assert sorted(complaints(house)) == [
        "house/hall/door.py:2: house.hall.door imports house.hall.knob",
        "house/hall/knob.py:1: house.hall.knob imports house.hall.door",
    ]


def test_a_room_without_a_floor_is_found(house: Path) -> None:
    (house / "shed.py").write_text("")
    assert complaints(house) == ["house/shed.py: house.shed"]
