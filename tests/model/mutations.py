"""Mutants of a Lua script by its structure: each leaves out a statement, reverses a condition, or leaves out a part of one."""

import re
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
    """Yield the mutants of a script, in the order of its text."""
    text = text_of(script)
    start = 0
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("--"):
            for condition in _CONDITION.finditer(line):
                at, end = start + condition.start("condition"), start + condition.end("condition")
                for instead in _instead_of(condition["condition"]):
                    yield _mutant(script, number, text, at, end, instead)
            if inline := _INLINE.search(line):
                yield _mutant(script, number, text, start + inline.start("statement"), start + inline.end("statement"))
            statement = _whole_statement(lines[number:])
            if _STATEMENT.fullmatch(statement.rstrip()) and _is_balanced(statement):
                yield _mutant(script, number, text, start, start + len(statement))
        start += len(line)


def _mutant(script: str, number: int, text: str, at: int, end: int, instead: str = "") -> Mutant:
    return Mutant(
        script, text[:at] + instead + text[end:], f"{number + 1}: {' '.join(text[at:end].split())} -> {instead or 'nothing'}"
    )


def _instead_of(condition: str) -> Iterator[str]:
    """Yield the reverse of a condition, and what is left of it without its first or its last part."""
    yield f"not ({condition})"
    parts = [each for each in _OPERATOR.finditer(condition) if _is_balanced(condition[: each.start()])]
    if parts:
        yield condition[parts[0].end() :]
        yield condition[: parts[-1].start()]


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
