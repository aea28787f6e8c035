"""Wraps the values of a source: each knows its place, which errors name, and notes the fields that are read from it."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple

from kp_scorer.adapters.shown import shown_by_python
from kp_scorer.errors import NotConverted, Problem

MOST_DEPTH: Final = 100  # Far deeper than any format nests, and far less than the stack allows.
_MOST_SHOWN: Final = 1_000_000
_HOLDS_ONE: Final = re.compile(r"\s*(?:[{\[]|(?:[A-Za-z_]\w*\()?_?(?:role|content)=)")
"""Matches the beginning of an object or a list. pydantic shows a message as its fields, with the role or content first."""
_NUMBERS: Final = re.compile(r"(^|\.)\d+(?=\.|$)")
_STRUCTURE: Final = frozenset({"type", "id", "index", "object", "status", "lc", "traceId", "kind", "role"})
"""Fields that state the kind of an object. Most readers know it by its other fields, so these do not count as unread."""
_NOT_SPELT: Final = re.compile(r"[\W_]+")
_MOST_KEY: Final = 64  # Longer keys are data.
_SKIPPED: Final = "\0"  # The key of skipped values in ``reads``; no path begins with this character.

_BESIDE_KWARGS: Final = frozenset({"kwargs", "input_str", "tags", "metadata"})  # Arguments of LangChain's callbacks.
_ENVELOPES: Final = frozenset({"output", "outputs", "input", "inputs", "input_args", "result", "data"})


class Node(NamedTuple):
    """A value of a source and its place. A missing value is None, like null."""

    line: int  # The line on which the source begins, counted from 1.
    path: str  # Dotted, list positions counted from 0, as in :class:`~kp_scorer.errors.Problem`; empty for the source itself.
    value: Any
    reads: dict[str, tuple[dict[str, Any], set[str]]] | None = None
    """The objects of a run by their paths, each with the keys that were read; None if that is not recorded."""

    def at(self, *keys: str) -> "Node":
        """Return the value under a path of keys; a missing value if an object on the way is missing.

        Raises NotConverted if a value on the way is not an object. The methods below raise it, too, for a value of
        the wrong type.
        """
        node = self
        for key in keys:
            fields = {} if node.value is None and node is not self else node.object()
            if node.reads is not None:
                node.reads.setdefault(node.path, (fields, set()))[1].add(key)
            node = node._replace(path=node._below(key), value=fields.get(key))
        return node

    def first(self, *keys: str) -> "Node":
        """Return the value under the first of these keys that is present; a missing value if none is."""
        return next((node for key in keys if (node := self.at(key)).value is not None), self.at(keys[0]))

    def at_plain(self, *names: str) -> "Node":
        """Return the value under the first of these plain names that is present, see :func:`keys_by_plain_name`."""
        return next((node for node in self.all_plain(*names) if node.value is not None), self.at(names[0]))

    def all_plain(self, *names: str) -> Iterator["Node"]:
        """Yield the values under these plain names that are present, in the order of the names."""
        keys = keys_by_plain_name(self.object())
        return (self.at(keys[name]) for name in names if name in keys)

    def skip(self) -> None:
        """Note that this value is of an unknown kind, and so is left out of its run."""
        if self.reads is not None:
            self.reads.setdefault(_SKIPPED, ({}, set()))[1].add(f"{self.line}:{self.path}")

    def object(self) -> dict[str, Any]:
        """Return this value, which must be an object."""
        if not isinstance(self.value, dict):
            raise self.refusal("expected an object")
        return self.value

    def items(self, start: int = 0) -> list["Node"]:
        """Return the items of this value from ``start`` on. It must be a list, or missing."""
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            raise self.refusal("expected a list")
        items = enumerate(self.value[start:], start)
        return [self._replace(path=self._below(number), value=item) for number, item in items]

    def each(self) -> list["Node"]:
        """Return the items of this value if it is a list; otherwise the value itself."""
        return self.items() if isinstance(self.value, list) else [self]

    def text(self) -> str:
        """Return this value, which must be a text; empty if it is missing."""
        if self.value is None:
            return ""
        if not isinstance(self.value, str):
            raise self.refusal("expected a text")
        return self.value

    def required_text(self) -> str:
        """Return this value, which must be a text that is not empty."""
        if not (text := self.text()):
            raise self.refusal("expected a text that is not empty")
        return text

    def number(self) -> float | None:
        """Return this value, which must be a number of at least 0, or missing."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not self.value >= 0:
            raise self.refusal("expected a number of at least 0")
        return self.value

    def parsed(self) -> "Node":
        """Return the object or list that this value holds as a text; any other value unchanged."""
        return self._replace(value=parsed(self.value))

    def refusal(self, expected: str) -> NotConverted:
        """Return the error for this place, which the caller raises."""
        return NotConverted(self.line, [Problem(self.path or "$", expected)])

    def _below(self, key: str | int) -> str:
        return f"{self.path}.{key}" if self.path else str(key)


def source(line: int, value: object) -> Node:
    """Return a value of the input as a source; raise NotConverted if it is nested too deeply."""
    node = Node(line, "", value)
    if _is_too_deep(value):
        raise node.refusal(f"expected nesting of at most {MOST_DEPTH}")
    return node


def keys_by_plain_name(fields: dict[str, Any]) -> dict[str, str]:
    """Return the keys of an object by their plain names, which have only letters and digits, in lower case.

    ``toolCallId`` and ``tool_call_id`` have the same plain name; the first of such keys counts.
    """
    return {_plain(key): key for key in reversed(fields)}


@lru_cache(maxsize=4_096)
def _plain(key: str) -> str:
    return _NOT_SPELT.sub("", key[:_MOST_KEY]).lower()


def skipped_in(run: Node) -> int:
    """Return the number of values of a run that were skipped."""
    return len((run.reads or {}).get(_SKIPPED, ({}, set()))[1])


def unread_in(run: Node) -> set[str]:
    """Return the paths, without positions in lists, of the fields of a run that are not empty and were never read."""
    read, unread = set(), set()
    start = _NUMBERS.sub("", run.path)
    for path, (fields, keys) in (run.reads or {}).items():
        for key, value in fields.items():
            name = _NUMBERS.sub("", f"{path}.{key}").removeprefix(start).strip(".")
            if key in keys:
                read.add(name)
            elif key not in _STRUCTURE and value not in (None, "", [], {}, 0):
                unread.add(name)
    return unread - read


def objects_in(items: object) -> list[dict[str, Any]]:
    """Return the objects in a list; none for anything else."""
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def field_at(value: object, path: str) -> Any:
    """Return the value at a dotted path in an object, or in the JSON of one; None if it is missing. Keys may contain dots."""
    value = parsed(value)
    if isinstance(value, list):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, dict) or path in value:
        return value.get(path) if isinstance(value, dict) else None
    ends = (dot.start() for dot in re.finditer(r"\.", path))
    fields = (field_at(value[path[:end]], path[end + 1 :]) for end in ends if path[:end] in value)
    return next((field for field in fields if field is not None), None)


def parsed(value: object) -> Any:
    """Return the object or list that a text holds as JSON or as Python's ``repr``; any other value unchanged."""
    if not isinstance(value, str) or not _HOLDS_ONE.match(value):
        return value
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        content = None
        if len(value) <= _MOST_SHOWN and ("'" in value or "=" in value):
            with suppress(ValueError):
                content = shown_by_python(value, MOST_DEPTH)
    return value if content is None or _is_too_deep(content) else content


def unwrapped(value: object, *, are_arguments: bool = False) -> Any:
    """Return a value without a recorder's wrapping: a text of JSON, an object with one key such as ``output``, or ``kwargs``.

    An argument of a tool may itself be called ``output``. So with ``are_arguments``, only wrapped objects are unwrapped.
    """
    for _ in range(MOST_DEPTH):
        value = parsed(value)
        if isinstance(value, str) and value[:1] == value[-1:] == '"':
            with suppress(ValueError):
                value = parsed(json.loads(value))
        if not isinstance(value, dict):
            break
        # Flags beside arguments are the recorder's own.
        filled = {key: each for key, each in value.items() if not (isinstance(each, bool) or each in (None, "", [], {}))}
        if "kwargs" in value and not filled.keys() - {"kwargs"}:
            inner = value["kwargs"]
        elif {"args", "kwargs"} >= filled.keys() and isinstance(args := value.get("args"), list) and len(args) == 1:
            inner = args[0]
            if isinstance(inner, str):
                break
        elif (
            len(wrapped := value.keys() - _BESIDE_KWARGS if "kwargs" in value else value.keys()) == 1 and wrapped <= _ENVELOPES
        ):
            inner = value[next(iter(wrapped))]
        else:
            break
        if are_arguments and not isinstance(parsed(inner), dict):
            break
        value = inner
    return value


def as_json(value: object) -> str:
    """Return a value as JSON, with sorted keys, so that equal values give the same text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _is_too_deep(value: object) -> bool:
    # Go level by level: recursion may exceed the stack before it reaches the limit.
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [outer for outer in level if isinstance(outer, dict | list)]
        if not level:
            return False
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return True
