"""Every error of the package stands in `errors.py`, and the tree at its top is true."""

import ast
import builtins
import re

from kp_scorer import errors
from kp_scorer.errors import ScorerError

from tests.support.paths import REPOSITORY

PACKAGE = REPOSITORY / "worker" / "kp_scorer"


def drawn() -> dict[str, str]:
    """Each class of the tree, with the class above it."""
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
