"""Imports between the package's rooms point down to lower floors, and tiers of tests import only the support that they share.

All errors are in ``errors.py``, and the tree that is drawn there is true.
"""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from kp_scorer import errors
from kp_scorer.errors import ScorerError

from tests.support.paths import REPOSITORY

PACKAGE: Final = REPOSITORY / "worker" / "kp_scorer"
TESTS: Final = REPOSITORY / "tests"

Floors = Sequence[frozenset[str]]


def floors_of(*names: str) -> Floors:
    """Return floors from the bottom up; each name lists the rooms of a floor."""
    return [frozenset(floor.split()) for floor in names]


FLOORS: Final = floors_of(
    "characters errors files",
    "bounded limits trace",
    "decision",
    "decoding",
    "adapters",
    "scoring",
    "coverage novelty",
    "gate",
    "spans",
    "settings",
    "logs local monitoring",
    "endpoints report",
    "checks embedding",
    "novelty_meter store",
    "broker",
    "decider",
    "offline client reviser",
    "kept",
    "process serve",
    "app",
    "cli",
)
"""Floors from the bottom up. A room is a top-level module or package; it may import itself and the rooms of lower floors."""

DATA: Final = frozenset({"samples", "reference"})
"""Rooms that hold data files and no code."""


class Import(NamedTuple):
    """An import of one module by another of the same tree.

    As it is read from the source, imports within functions or for types alone count, too.
    """

    importer: str
    imported: str
    place: str
    """The file and the line; the file's path begins with the name of the tree."""

    def __str__(self) -> str:
        return f"{self.place}: {self.importer} imports {self.imported}"


def modules_in(root: Path) -> dict[str, Path]:
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


@cache
def imports_in(root: Path) -> list[Import]:
    """Return every import within the package in the folder ``root``.

    Importing a module also imports the packages that hold it. These imports are left out, as they would make a circle of each
    package that names its own modules.
    """
    modules = modules_in(root)
    imports = []
    for importer, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                place = f"{path.relative_to(root.parent)}:{node.lineno}"
                own = (name for name in _imported(node, modules) if name.partition(".")[0] == root.name)
                imports += [Import(importer, imported, place) for imported in own]
    return imports


def _imported(node: ast.Import | ast.ImportFrom, modules: Mapping[str, Path]) -> Iterator[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        yield from names
    else:
        assert not node.level, "imports are absolute"
        base = node.module or ""
        yield from (submodule if (submodule := f"{base}.{name}") in modules else base for name in names)


def room_of(module: str) -> str:
    """Return the room of a module; empty for the public face, which is the package itself."""
    return module.partition(".")[2].partition(".")[0]


def homeless(floors: Floors) -> list[str]:
    """Return the modules of the package whose room is on no floor."""
    rooms = {"", *DATA.union(*floors)}
    return [name for name in modules_in(PACKAGE) if room_of(name) not in rooms]


def upward(imports: Sequence[Import], floors: Floors) -> list[str]:
    """Return the imports of rooms that are not on a lower floor than their importer; the public face is above all floors."""
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
    top = len(floors)
    return [
        str(each)
        for each in imports
        if (own := room_of(each.importer)) and own != (imported_room := room_of(each.imported))
        if floor_of.get(imported_room, top) >= floor_of.get(own, top)
    ]


def circle(imports: Sequence[Import]) -> list[str]:
    """Return the imports that form a circle of modules, in its order; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for each in imports:
        graph.setdefault(each.importer, set()).add(each.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # CycleError lists each module before one that imports it.
        steps = list(zip(error.args[1][1:], error.args[1][:-1], strict=True))
        return [next(str(each) for each in imports if each[:2] == step) for step in reversed(steps)]
    return []


def test_the_page_on_the_architecture_has_every_room_once() -> None:
    page = (REPOSITORY / "worker" / "ARCHITECTURE.md").read_text("utf-8")
    table = page.partition("## The floors")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(room for floor in FLOORS for room in floor)


def test_every_module_is_in_a_room_with_a_floor() -> None:
    assert homeless(FLOORS) == []


def test_no_room_imports_from_its_own_floor_or_a_higher_one() -> None:
    assert upward(imports_in(PACKAGE), FLOORS) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    # The public face is left out: it imports names on first use, and the test of the floors shows that no module imports it.
    assert circle([each for each in imports_in(PACKAGE) if room_of(each.importer)]) == []


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.stem for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


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


def test_violations_of_the_rules_are_found() -> None:
    assert upward(imports_in(PACKAGE), FLOORS[::-1])
    assert homeless(FLOORS[1:])
    there, back = Import("house.hall", "house.attic", "hall.py:1"), Import("house.attic", "house.hall", "attic.py:1")
    assert sorted(circle([there, back])) == [str(back), str(there)]
    assert circle([there]) == []


def drawn() -> dict[str, str]:
    """Return each class of the tree that ``errors.py`` draws, with the class above it."""
    above: dict[int, str] = {0: "Exception"}
    parents = {}
    for indent, name in re.findall(r"^ {4}((?:│   |    |├── |└── )*)([A-Z]\w+)", str(errors.__doc__), re.MULTILINE):
        depth = len(indent) // 4
        parents[name] = above[depth]
        above[depth + 1] = name
    return parents


def test_the_tree_shows_every_error_below_its_base() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ScorerError)]
    assert drawn() == {each.__name__: each.__base__.__name__ for each in classes if each.__base__}


def test_no_other_module_defines_an_error() -> None:
    names = {*drawn(), *(name for name, value in vars(builtins).items() if str(value).endswith(("Error'>", "Exception'>")))}
    elsewhere = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and names & {base.id for base in node.bases if isinstance(base, ast.Name)}
    ]
    assert elsewhere == []
