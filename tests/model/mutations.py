"""Makes mutants of a Lua script: each lacks a statement or a part of a condition, or has a condition reversed."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from tests.model.patched_scripts import Mutant, text_of

_CONDITION: Final = re.compile(r"\bif (?P<condition>.+?) then\b")
_INLINE: Final = re.compile(r" (?:then|do) (?P<statement>[a-z_.]+\(.+\)) end$")
_STATEMENT: Final = re.compile(
    r"\s*(?!local |return|for |if |else|while |expect|error|use_reserve)[a-z_.]+(?:\(.*\)| = .+)", re.DOTALL
)
"""A call or an assignment, except for checks of keys and uses of the reserve, which matter only before the model begins."""
_OPERATOR: Final = re.compile(r" (?:and|or) ")


def mutants_of(script: str) -> Iterator[Mutant]:
    """Yield the mutants of a script in the order of its text.

    If several have the same description, the later ones are numbered.
    """
    meanings = Counter[str]()
    for mutant in _changes_to(script, text_of(script)):
        meanings[mutant.meaning] += 1
        number = meanings[mutant.meaning]
        yield mutant if number == 1 else mutant._replace(meaning=f"{mutant.meaning} ({number})")


def _changes_to(script: str, text: str) -> Iterator[Mutant]:
    start = 0
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("--"):
            for condition in _CONDITION.finditer(line):
                at, end = start + condition.start("condition"), start + condition.end("condition")
                for change, instead in _instead_of(condition["condition"]):
                    yield _mutant(script, text, at, end, change, instead)
            if inline := _INLINE.search(line):
                yield _mutant(script, text, start + inline.start("statement"), start + inline.end("statement"))
            statement = _whole_statement(lines[number:])
            if _STATEMENT.fullmatch(statement.rstrip()) and _is_balanced(statement):
                yield _mutant(script, text, start, start + len(statement))
        start += len(line)


def _mutant(script: str, text: str, at: int, end: int, change: str = "left out", instead: str = "") -> Mutant:
    return Mutant(script, text[:at] + instead + text[end:], f"{change}: {' '.join(text[at:end].split())}")


def _instead_of(condition: str) -> Iterator[tuple[str, str]]:
    """Yield a condition reversed, without its first part, and without its last part."""
    yield "reversed", f"not ({condition})"
    parts = [each for each in _OPERATOR.finditer(condition) if _is_balanced(condition[: each.start()])]
    if parts:
        yield "without first", condition[parts[0].end() :]
        yield "without last", condition[: parts[-1].start()]


def _whole_statement(lines: list[str]) -> str:
    """Return the first line, and as many of the next ones as it takes to close all brackets."""
    statement = lines[0]
    for line in lines[1:]:
        if _is_balanced(statement):
            break
        statement += line
    return statement


def _is_balanced(code: str) -> bool:
    return all(code.count(opening) == code.count(closing) for opening, closing in ("()", "{}"))
