"""Converters and readers take time in proportion to their input, whatever it is, so that no short text can stall them."""

import io
import json
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Final

import click
import pytest
from kp_scorer.adapters.building import Run
from kp_scorer.adapters.chat import chat_of
from kp_scorer.adapters.node import Node
from kp_scorer.adapters.pieces import Piece, is_error
from kp_scorer.cli.input import read_traces
from kp_scorer.limits import Limits

from tests.support.builders import LIMITS
from tests.support.converting import converted_and_refused
from tests.support.json_values import Place, replaced, value_at
from tests.support.slopes import BEFORE, UNITS, is_steep, leaves_in
from tests.unit.test_adapter_openai import assistant, user
from tests.unit.test_adapter_otel import ANSWERED, ASKED, ROOT, chat, export, message, span, text
from tests.unit.test_adapters import EXAMPLES
from tests.unit.test_chat import calls_of, result, run_of

CHARS: Final = 10_000
ITEMS: Final = 50
SOME_UNITS: Final = ("a", "7", " ", "\n", "'", '"', "\\", "[", "{},", "a.", "a_", "```bash\n", "user: a\n", "\u4e00")
"""A selection of units, for records with too many places to try every unit in each."""

RECORDS: Final = EXAMPLES | {
    "commands in texts": {
        "messages": [{"role": "user", "content": "Do it."}, {"role": "assistant", "content": "```bash\nls\n```"}],
        "trajectory_format": "mini-swe-agent-1",
    }
}


def text_of(unit: str, before: str = "", after: str = "") -> Callable[[int], str]:
    return lambda chars: before + unit * (chars // len(unit)) + after


def is_an_error(text: str) -> bool:
    return is_error(Piece(Node(1, "", None), "result", text))


def read(raw: bytes) -> object:
    with suppress(click.BadParameter):
        return list(read_traces(io.BufferedReader(io.BytesIO(raw)), LIMITS))
    return None


def test_text_that_may_hold_a_value_is_read_in_linear_time() -> None:
    # Only a text with ``'`` or ``=`` is parsed as a value that Python shows. Each of these texts ends with both, so all are
    # parsed.
    steep = [each for each in product(BEFORE, UNITS) if is_steep(is_an_error, text_of(each[1], each[0], "]='"), CHARS)]
    assert steep == []


@pytest.mark.parametrize("place", ["{}", '{{"a": "{}', '{{\n"a": "{}', '{{"a": "{}"}}\n{{', "{{\n{}", "a{}!"])
def test_input_of_any_bytes_is_read_in_linear_time(place: str) -> None:
    def made(unit: str) -> Callable[[int], bytes]:
        return lambda chars: place.format(text_of(unit)(chars)).encode()

    steep = [(unit, inner) for unit in UNITS for inner in {unit, json.dumps(unit)[1:-1]} if is_steep(read, made(inner), CHARS)]
    assert steep == []


def convert(value: object) -> object:
    return converted_and_refused("", [value])


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_record_of_each_format_is_converted_in_linear_time_whichever_text_grows(name: str) -> None:
    def made(path: Place, unit: str) -> Callable[[int], object]:
        return lambda chars: replaced(RECORDS[name], path, text_of(unit)(chars))

    places = product(leaves_in(RECORDS[name], str), SOME_UNITS)
    assert [(path, unit) for path, unit in places if is_steep(convert, made(path, unit), CHARS)] == []


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_record_of_each_format_is_converted_in_linear_time_whichever_list_grows(name: str) -> None:
    def made(path: Place) -> Callable[[int], object]:
        return lambda items: replaced(RECORDS[name], path, value_at(RECORDS[name], path) * items)

    assert [path for path in leaves_in(RECORDS[name], list) if is_steep(convert, made(path), ITEMS)] == []


def test_question_that_is_said_again_among_many_messages_is_found_in_linear_time() -> None:
    def made(words: int) -> object:
        messages = [message for number in range(words // 4) for message in (user(f"{number}"), assistant("Done."))]
        span = {"traceId": "t", "startTime": "2026-01-01T00:00:00Z", "endTime": "2026-01-01T00:00:01Z"}
        outer = span | {"id": "a", "type": "SPAN", "input": "a " * words, "output": "b " * words}
        inner = span | {"id": "b", "parentObservationId": "a", "type": "GENERATION", "input": messages, "output": "No."}
        return [outer, inner]

    assert not is_steep(convert, made, 4_000)


def test_many_texts_after_large_ones_are_joined_in_linear_time() -> None:
    def made(texts: int) -> object:
        large = [message("assistant", text(f" {number}" + "a" * 1_000 * texts)) for number in range(8)]
        prompt = [ASKED, *(message("assistant", text(f"{number}")) for number in range(texts))]
        return export(chat(0, 10, [ASKED], large), chat(20, 30, prompt, [ANSWERED]))

    assert not is_steep(convert, made, 700)


@pytest.mark.parametrize("parent", ["", "f" * 16])
def test_run_that_goes_on_for_long_and_lacks_a_span_is_joined_in_linear_time(parent: str) -> None:
    def made(spans: int) -> list[object]:
        orphan = span("orphan", 0, 1, {}, parent="e" * 16)
        later = (span("later", 11_000 * number, 11_000 * number + 1, {}, parent=parent) for number in range(spans))
        return [export(orphan), export(ROOT), *map(export, later)]

    assert not is_steep(lambda sources: converted_and_refused("otel", sources), made, 200)


@pytest.mark.parametrize(
    "messages",
    [
        lambda count: [calls_of(*map(str, range(count))), *(result(str(number), "Done.") for number in range(count))],
        lambda count: [calls_of(*map(str, range(count))), *(result("other", "Done.") for _ in range(count))],
        lambda count: [each for number in range(count) for each in (calls_of(str(number)), result(str(number // 2), "Done."))],
        lambda count: [assistant("Still looking. " * 30) for _ in range(count)],
    ],
    ids=["results by id", "results without an id", "results of old calls", "an agent that goes on"],
)
def test_chat_of_many_messages_is_written_in_linear_time(messages: Callable[[int], list[object]]) -> None:
    def made(count: int) -> Run:
        return run_of({"messages": [user("Look."), *messages(count)]}, limits=Limits.of(2**23))

    assert not is_steep(chat_of, made, 1_000)
