"""Mutants of a Lua script by its structure: each leaves out a statement, reverses a condition, or leaves out a part of one."""

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
"""A call or an assignment. Scripts check their keys, and use what is reserved of a full Redis, before the model begins."""
_OPERATOR: Final = re.compile(r" (?:and|or) ")


def mutants_of(script: str) -> Iterator[Mutant]:
    """Yield the mutants of a script, in the order of its text; those that mean the same are numbered from the second on."""
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
    """Yield the reverse of a condition, and what is left of it without its first or its last part."""
    yield "reversed", f"not ({condition})"
    parts = [each for each in _OPERATOR.finditer(condition) if _is_balanced(condition[: each.start()])]
    if parts:
        yield "without first", condition[parts[0].end() :]
        yield "without last", condition[: parts[-1].start()]


def _whole_statement(lines: list[str]) -> str:
    """Return the first line, and those after it until all its brackets are closed."""
    statement = lines[0]
    for line in lines[1:]:
        if _is_balanced(statement):
            break
        statement += line
    return statement


def _is_balanced(code: str) -> bool:
    return all(code.count(opening) == code.count(closing) for opening, closing in ("()", "{}"))
