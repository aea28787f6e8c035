"""The words of the code and of the pages: the field's own, and names that say what they name."""

import ast
import re
from collections.abc import Iterator
from itertools import chain
from typing import Final

import pytest

from tests.support.documents import DOCUMENTS
from tests.support.paths import REPOSITORY

PACKAGE: Final = REPOSITORY / "worker" / "kp_scorer"

SHIPPED: Final = (".conf", ".service", ".target", ".toml", ".yaml", ".yml")

PLACEHOLDERS: Final = frozenset(
    "begun found given held kept known one other placed rest said seen shown stuff taken tell thing things told what".split()  # noqa: SIM905
) | {"whole"}
"""Names that would fit anything. A name says what the thing is, to whoever searches for it."""

MOST_PER_THOUSAND_LINES: Final = 1.0
"""No more than the peers of the package have."""

IDIOMS: Final = {
    r"\bin hands?\b|\bHands\b": "in flight, unacknowledged",
    r"\b(give|gives|gave|given|giving)[ _]back\b": "requeue",
    r"\b(let|lets|letting)[ _]go\b": "acknowledge, release",
    r"\bbur(y|ies|ied|ial|ying)\b|_bur(y|ied|ial)\b": "dead-letter",
    r"\bsettle(d|r|s)?\b|\bsettling\b": "commit, publish, complete, resolve",
    r"\b(comes|came|come) again\b": "redelivered",
    r"\bhurr(y|ies)\b|\b(give|gives|gave)[ _]up\b": "drain, abort",
    r"\bstandstill\b|\bstands? still\b|\bstood still\b": "stalled",
    r"\bsick\b|Sick\b": "unhealthy",
    r"\b(chores|errands)\b": "periodic tasks, the I/O thread",
}
"""What is not written, and what is written instead. The names of what lies in Redis stay as they are."""


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Every name that a module binds: variables, parameters, attributes, functions and classes."""
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


@pytest.mark.parametrize("idiom", IDIOMS)
def test_package_and_pages_use_the_words_of_the_field(idiom: str) -> None:
    pages = (REPOSITORY / document for document in DOCUMENTS)
    shipped = (path for folder in ("config", "deploy") for path in (REPOSITORY / folder).rglob("*") if path.suffix in SHIPPED)
    places = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:100]}"
        for path in chain(PACKAGE.rglob("*.py"), PACKAGE.rglob("*.lua"), shipped, pages)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(idiom, line)
    ]
    assert not places, f"instead write: {IDIOMS[idiom]}\n" + "\n".join(places)


@pytest.mark.parametrize("word", ["backpressure", "graceful", "at-least-once", "idempotent", "retry", "backoff"])
def test_a_search_for_a_word_of_the_field_leads_to_its_code(word: str) -> None:
    assert any(word in path.read_text("utf-8").lower() for path in PACKAGE.rglob("*.py"))
