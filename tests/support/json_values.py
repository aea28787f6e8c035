"""Changes one value within JSON or within a JSON file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Place = tuple[str | int, ...]
"""The keys and list positions that lead to a value within another."""


def places_in(value: object) -> Iterator[Place]:
    """Yield the place of the value itself, and then of every value within it."""
    yield ()
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from ((key, *below) for below in places_in(inner))


def value_at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def replaced(value: Any, place: Place, put: object) -> Any:
    """Return a copy of a value in which the value at one place is replaced."""
    if not place:
        return put
    copied = value.copy()
    copied[place[0]] = replaced(value[place[0]], place[1:], put)
    return copied


def change_json(file: Path, **changed: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(content | changed), "utf-8")
