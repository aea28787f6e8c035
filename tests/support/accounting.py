"""Which dead letters keep which items of a queue's list."""

import base64
import binascii
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Kept:
    """Dead letters, to be found by the bytes that were on the list."""

    def __init__(self, payloads: Mapping[str, bytes]) -> None:
        """Take the letters' payloads by their ids."""
        self._found: defaultdict[bytes, set[str]] = defaultdict(set)
        for letter_id, payload in payloads.items():
            for form in {payload, _meaning(payload)}:
                self._found[form].add(letter_id)

    def of(self, item: bytes) -> set[str]:
        """Ids of the dead letters that keep all that an item carried: the item itself, its body, or the trace in it."""
        return {letter_id for form in _forms(item) for letter_id in self._found.get(form, ())}


def _forms(item: bytes) -> Iterator[bytes]:
    yield item
    envelope = _parsed(item)
    if isinstance(envelope, dict):
        # It may be a submission itself.
        yield _canonical(envelope)
    body = envelope.get("body") if isinstance(envelope, dict) else None
    if not isinstance(body, str):
        return
    raw = body.encode("utf-8", "surrogatepass")
    yield raw
    try:
        raw = base64.b64decode(raw)
    except binascii.Error:
        pass
    else:
        yield raw
    yield from map(_canonical, _submissions(_parsed(raw)))


def _submissions(body: Any) -> Iterator[Any]:
    """What a worker may take for the submission in a body: the only argument, or all arguments."""
    match body:
        case [list() as args, dict() as kwargs, _]:
            pass
        case dict() if body.keys() & {"args", "kwargs"}:
            yield body
            args, kwargs = body.get("args", []), body.get("kwargs", {})
        case dict():
            yield body
            return
        case _:
            return
    yield {"args": args, "kwargs": kwargs}
    if isinstance(args, list) and len(args) == 1 and not kwargs:
        yield args[0]
    if not args and isinstance(kwargs, dict) and list(kwargs) == ["trace"]:
        yield kwargs["trace"]


def _meaning(raw: bytes) -> bytes:
    parsed = _parsed(raw)
    return raw if parsed is None else _canonical(parsed)


def _parsed(raw: bytes) -> Any:
    with _deep_recursion():
        try:
            return json.loads(raw.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            return None


def _canonical(value: Any) -> bytes:
    with _deep_recursion():
        return json.dumps(value, sort_keys=True).encode()


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """What a worker can parse, on a stack less deep than pytest's, must be parsed here too."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
