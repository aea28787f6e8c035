"""Showing dead letters: whatever one holds, it is one line of JSON that any program reads, and the next one is shown too."""

import json
import tracemalloc
from typing import Any

import pytest
from click.testing import CliRunner
from kp_scorer.cli.main import commands
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.builders import minimal_payload

NO_PLAIN_JSON = [
    *(b"[" * depth + b"]" * depth for depth in (33, *range(930, 1_000), 100_000)),
    b'[[{"a":NaN}],{},null]',
    b"[Infinity]",
    b"[-Infinity]",
    b'{"b":1e999}',
    b'["\\ud800"]',
    b"[" + b"1" * 5_000 + b"]",
    b"[" + b"{}," * 20_000 + b"0]",
    b"\xff\xfe",
    "[1]".encode("utf-16"),
    b"",
]


def shown(settings: Settings) -> list[Any]:
    """What each dead letter shows as its payload."""

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    found = CliRunner().invoke(commands, ["dead-letter", "show", "--broker-url", settings.broker.url], catch_exceptions=False)
    return [json.loads(line, parse_constant=refuse)["payload"] for line in found.stdout.splitlines()]


def test_what_is_no_plain_json_is_shown_as_text_and_what_is_as_json(settings: Settings, store: Store) -> None:
    plain = [minimal_payload(), [1.5, None, "x" * 200_000], {"a": {"b": ["\u2028", -1]}}]
    for payload in [*NO_PLAIN_JSON, *(json.dumps(content).encode() for content in plain)]:
        store.dead_letters.bury(payload, "malformed", "message: expected a task")
    texts = {payload.decode("utf-8", "backslashreplace") for payload in NO_PLAIN_JSON}
    found = shown(settings)
    assert {content for content in found if isinstance(content, str)} == texts
    # Those buried within the same millisecond come in any order.
    assert sorted(map(repr, (content for content in found if not isinstance(content, str)))) == sorted(map(repr, plain))


def test_showing_a_letter_of_very_many_values_takes_memory_for_its_bytes_alone(settings: Settings, store: Store) -> None:
    payload = b'["a' + b'",{},"' * 1_000_000 + b'"]'
    store.dead_letters.bury(payload, "malformed", "message: expected a smaller one")
    tracemalloc.start()
    (found,) = shown(settings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == payload.decode()
    assert peak < 10 * len(payload)
