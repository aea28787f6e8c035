"""Submissions that cost a worker as much as their bytes allow, such as a hostile producer would send to keep it busy."""

import json
from collections.abc import Iterator
from typing import Final

from kp_scorer.limits import Limits

from tests.support.builders import changed, maximal_payload

PLACES: Final = (
    "steps",
    "steps.0.input",
    "steps.0.tool",
    "task.input_schema",
    "metadata.validated_by",
    "knowledge_graph_delta.entities",
    "unknown",
    "@type",
)
"""The places where a submission has a list or an object, may have one, or must not have one."""

ITEMS: Final = {
    "empty objects": "{}",
    "empty lists": "[]",
    "zeros": "0",
    "nulls": "null",
    "NaN": "NaN",
    "infinities": "-Infinity",
    "infinite by size": "1e999",
    "objects of one": '{"":0}',
    "lists of lists": "[[]]",
    "nested objects": '{"":' * 20 + "0" + "}" * 20,
    "nested objects around texts": '{"":' * 19 + '"' + "\u00e9," * 300 + '"' + "}" * 19,
    "nested lists": "[" * 20 + "]" * 20,
    "nested too deep": "[" * 900 + "]" * 900,
    "integers of 1,000 digits": "9" * 1_000,
    "integers of 4,300 digits": "9" * 4_300,
    "fractions of 1,000 digits": "0." + "7" * 998,
    "short texts": '"ab"',
    "long texts": '"' + "x" * 90_000 + '"',
    "texts of commas": '"' + "," * 90_000 + '"',
    "texts of quotes": '"' + '\\"' * 45_000 + '"',
    "texts of escapes": '"' + "\\u00e9" * 15_000 + '"',
    "texts beyond ASCII": '"' + "\U0001f600\u00e9" * 10_000 + '"',
    "lone surrogates": '"\\ud800"',
    "repeated key": "{" + ",".join(['"k":0'] * 500) + "}",
    "least steps": '{"step_id":0,"type":"thought"}',
    "full steps": '{"step_id":0,"type":"tool_call","content":"a","tool":{"name":"b","mcp_server":"c"},'
    '"input":{"a":1,"b":"2","c":null},"output_summary":"d","latency_ms":1.5}',
    "steps with all wrong": '{"step_id":"","type":0,"content":0,"tool":{},"input":0,"output_summary":0,"latency_ms":""}',
    "entities": '{"name":"","type":""}',
    "entities with all wrong": '{"name":0,"type":0}',
}
"""The items that the lists are filled with."""


FILLERS: Final = {
    "commas": ",",
    "spaces": " ",
    "quotes": '\\"',
    "backslashes": "\\\\",
    "backslashes before u": "\\\\u",
    "slashes": "\\/",
    "control characters": "\\u0001",
    "emoji": "\U0001f600",
    "texts": '","',
}
"""Characters that make a text take much more memory, or much less, than the bytes of its JSON suggest."""

COSTLY_TEXTS: Final = {
    "spaces": " " * 1_000_000,
    "spaces, then a word": " " * 500_000 + "a" * 99 + " " * 400_000 + "a",
    "punctuation": "!" * 1_000_000,
    "one word": "a" * 1_000_000,
    "words of 99 letters": ("a" * 99 + " ") * 10_000,
    "words of 33 syllables": ("\ud55c" * 33 + " ") * 9_000,
    "unknown words": ("a" * 98 + "\u2603\u0416 ") * 9_000,
    "words that are too long": ("a" * 1_900 + " ") * 500,
    "accents": "\u0301" * 500_000,
    "accents out of order": "\u0301\u0316" * 250_000,
    "vowels out of order": "\u0e48\u0e38" * 160_000,
    "ligatures of 18 letters": "\ufdfa" * 330_000,
    "controls and spaces": "\x7f \u0301" * 250_000,
    "brackets": "[" * 1_000_000,
    "added tokens": "[MASK]" * 160_000,
    "private use": "\U000f0000" * 250_000,
    "ideographs": "\u4e00" * 330_000,
}
"""Texts with as many bytes as a trace may have, which make very many tokens or very few."""


def costly_submissions(limits: Limits) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of a submission for every item in every place, as large as the limits allow.

    If the limit on values comes first, the submission comes a second time, filled to the limit on bytes, and so do those with
    invalid steps.
    """
    for place in PLACES:
        for name, item in ITEMS.items():
            by_bytes = (limits.message_bytes - 2_000) // (len(item.encode()) + 1)
            inner_values = 0 if item.startswith('"') else sum(map(item.count, ",[{"))
            by_values = (limits.values - 100) // (1 + inner_values)
            by_steps = limits.steps if place == "steps" else by_bytes
            for count in sorted({min(by_bytes, by_values, by_steps), by_bytes}):
                yield f"{place}: {count:,} {name}", filled(place, item, count)


def oversized_bodies(limits: Limits) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the body of messages as large as may be unpacked, whose texts take four bytes per character."""
    largest_bytes = 4 * limits.message_bytes + 65_000
    for name, item in FILLERS.items():
        text = item * ((largest_bytes - 100) // len(item.encode()))
        yield f"body of {name}", f'[["\U0001f600{text}"],{{}},null]'.encode()
    text = '[["' + "\U0001f600" + "x" * limits.message_bytes + '"'
    yield "body padded with white space", (text + " " * (largest_bytes - len(text.encode())) + "],{},null]").encode()


def filled(place: str, item: str, count: int) -> bytes:
    """Return an otherwise valid submission with ``count`` copies of an item, given as JSON, in one place."""
    mark = "list of items"
    value = {"": [mark]} if place == "steps.0.input" else [mark]
    text = json.dumps(changed(maximal_payload(), place, value), separators=(",", ":"))
    return text.replace(f'"{mark}"', ",".join([item] * count)).encode()
