"""The names of the code say what they name."""

import ast
from collections.abc import Iterator
from typing import Final

import pytest

from tests.support.paths import REPOSITORY

PLACEHOLDERS: Final = frozenset(
    "begun found given held kept known one other placed rest said seen shown stuff taken tell thing things told what".split()  # noqa: SIM905
) | {"whole"}
"""Names that would fit anything. A name should tell those who search for a thing what it is."""

MOST_PER_THOUSAND_LINES: Final = 1.0
"""The rate of such names that the peers of the package have; this package has no more."""


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module binds: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


@pytest.mark.parametrize("folder", ["worker", "tests"])
def test_names_say_what_they_name(folder: str) -> None:
    placeholders, lines = [], 0
    for path in (REPOSITORY / folder).rglob("*.py"):
        text = path.read_text("utf-8")
        lines += text.count("\n")
        names = [name for name in bound_names(ast.parse(text)) if name.strip("_").lower() in PLACEHOLDERS]
        placeholders += [f"{path.relative_to(REPOSITORY)}: {name}" for name in names]
    assert len(placeholders) <= MOST_PER_THOUSAND_LINES * lines / 1_000, "\n".join(placeholders)
