"""What other formats say, read place by place: every value knows where it stands, so every error can name it."""

import json
from typing import Any, Final, NamedTuple

from kp_scorer.errors import NotConverted, Problem

MOST_DEPTH: Final = 100
"""Of a source, far more than any of these formats nests; what is no deeper can be walked through and printed."""


class Node(NamedTuple):
    """A value of a source, and where it stands; what is not there is None, as null is."""

    line: int
    """The line on which the source begins, counted from 1."""
    path: str
    """Dotted, list positions counted from 0, as in :class:`~kp_scorer.errors.Problem`; empty for the source itself."""
    value: Any

    def at(self, *keys: str) -> "Node":
        """The value under a key of this object, of the object there, and so on."""
        found = self
        for key in keys:
            found = found._replace(path=found.below(key), value=found.object().get(key))
        return found

    def first(self, *keys: str) -> "Node":
        """The value under the first of several keys that is there; under the first key if none is."""
        return next((found for key in keys if (found := self.at(key)).value is not None), self.at(keys[0]))

    def below(self, key: str | int) -> str:
        """The path of something in this value."""
        return f"{self.path}.{key}" if self.path else str(key)

    def object(self) -> dict[str, Any]:
        """This value, which must be an object."""
        if not isinstance(self.value, dict):
            raise self.refusal("expected an object")
        return self.value

    def items(self) -> list["Node"]:
        """The items of this value, which must be a list, or missing."""
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            raise self.refusal("expected a list")
        return [self._replace(path=self.below(number), value=item) for number, item in enumerate(self.value)]

    def text(self) -> str:
        """This value, which must be a text; empty if it is missing."""
        if self.value is None:
            return ""
        if not isinstance(self.value, str):
            raise self.refusal("expected a text")
        return self.value

    def required_text(self) -> str:
        """This value, which must be a text that is not empty."""
        if not (text := self.text()):
            raise self.refusal("expected a text that is not empty")
        return text

    def number(self) -> float | None:
        """This value, which must be a number of at least 0, or missing."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not self.value >= 0:
            raise self.refusal("expected a number of at least 0")
        return self.value

    def parsed(self) -> "Node":
        """This value, or what it says if it is a text that holds a JSON object or list."""
        return self._replace(value=parsed(self.value))

    def refusal(self, expected: str) -> NotConverted:
        """The error that says what was expected here; to be raised."""
        return NotConverted(self.line, [Problem(self.path or "$", expected)])


def source(line: int, value: object) -> Node:
    """A source of the input.

    Raises:
        NotConverted: it is nested so deep that it can be none of any format.
    """
    found = Node(line, "", value)
    if _is_deeper(value, MOST_DEPTH):
        raise found.refusal(f"expected nesting of at most {MOST_DEPTH}")
    return found


def parsed(value: object) -> Any:
    """What a text says if it holds a JSON object or list, of no more depth than a source; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if _is_deeper(found, MOST_DEPTH) else found


def as_json(value: object) -> str:
    """A value as JSON: the same text for the same content, whatever the order of keys."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _is_deeper(value: object, most: int) -> bool:
    # Level by level, not by recursion, which may end before this does.
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(value, dict | list) for value in level)
