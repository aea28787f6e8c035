"""Items of a queue's Redis list: good messages, and what careless producers make of them."""

import base64
import json
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from kp_scorer.broker.wire import TASK_NAME

from tests.fuzz.mutations import base_texts, damaged, mutated_payload, odd_value

Envelope = dict[str, Any]

_HEADERS: Final[Envelope] = {
    **dict.fromkeys(("shadow", "eta", "expires", "group", "parent_id")),
    "lang": "py",
    "task": TASK_NAME,
    "retries": 0,
    "timelimit": [None, None],
    "argsrepr": "(trace,)",
    "kwargsrepr": "{}",
    "origin": "gen1@somewhere",
    "ignore_result": True,
}
_PROPERTIES: Final[Envelope] = {
    "delivery_info": {"exchange": "", "routing_key": "traces"},
    "delivery_mode": 2,
    "priority": 0,
    "body_encoding": "base64",
}


class Raw(NamedTuple):
    """An item of the list, and the trace id that a decision on it would have."""

    item: bytes
    trace_id: str


def message(trace: Any, token: str) -> Envelope:
    """What a Celery 5 app sends, in everything that matters."""
    return {
        "body": encoded([[trace], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": _HEADERS | {"id": token, "root_id": token},
        "properties": _PROPERTIES | {"correlation_id": token, "delivery_tag": token},
    }


def encoded(body: Any) -> str:
    """A body as the Redis transport carries it."""
    return base64.b64encode(json.dumps(body).encode()).decode()


def items(count: int, seed: int) -> Iterator[Raw]:
    """Good messages, odd ones, broken ones, and items that are no messages at all, in turns."""
    makers: tuple[Callable[[random.Random, Any, str], Any], ...] = (
        lambda chance, trace, token: message(trace, token),
        lambda chance, trace, token: message(mutated_payload(chance, json.dumps(trace)), token),
        _odd_body,
        _odd_part,
        lambda chance, trace, token: mutated_payload(chance, json.dumps(message(trace, token))),
        _deep,
        lambda chance, trace, token: damaged(chance, json.dumps(message(trace, token)).encode()),
        _damaged_base64,
        _no_envelope,
    )
    bases = base_texts()
    for number in range(count):
        chance = random.Random(f"{seed}:{number}")
        token = f"fuzz-{seed}-{number:06}"
        trace = json.loads(chance.choice(bases)) | {"id": f"kp:trace:{token}"}
        made = makers[number % len(makers)](chance, trace, token)
        yield Raw(made if isinstance(made, bytes) else json.dumps(made).encode("utf-8", "surrogatepass"), trace["id"])


def _odd_body(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    body = chance.choice(
        (
            [[trace, trace], {}, {}],
            [[], {"trace": trace}, {}],
            [[], {"trace": trace, "more": odd_value(chance)}, {}],
            [[trace], {"token": token}, None],
            [trace, {}, {}],
            [[trace], [], {}],
            [[trace]],
            {"args": [trace]},
            trace,
            [token],
            token,
            mutated_payload(chance, json.dumps([[trace], {}, {"chord": None}])),
        )
    )
    return message(None, token) | {"body": encoded(body)}


def _odd_part(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    made = message(trace, token)
    part = chance.choice(("headers", "properties"))
    return made | {part: mutated_payload(chance, json.dumps(made[part]))}


def _deep(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    """Nesting about as deep as Python can parse: just under what stops the parser, it must not stop what comes after."""
    made = message(None, token)
    depth = chance.choice((*range(880, 1_000, 4), 2_000, 20_000))
    inside = "[" * depth + json.dumps(token) + "]" * depth
    body = f'[[{{"id": {json.dumps(trace["id"])}, "input": {inside}}}], {{}}, {{}}]'
    return made | {"body": base64.b64encode(body.encode()).decode()}


def _damaged_base64(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    made = message(trace, token)
    text = made["body"]
    at = chance.randrange(len(text))
    inserted = [text[:at] + odd + text[at:] for odd in ("\ud800", "*", "=", "\u0660")]
    made["body"] = chance.choice((*inserted, text[:at], text[1:], token, ""))
    return made


def _no_envelope(chance: random.Random, trace: dict[str, Any], token: str) -> bytes:
    raw = json.dumps(trace).encode()
    return chance.choice(
        (
            raw,
            token.encode(),
            b"%s\xff\xfe" % token.encode(),
            json.dumps(token).encode(),
            json.dumps([token]).encode(),
            json.dumps([message(trace, token)]).encode(),
            json.dumps({"trace": trace}).encode(),
            b"[" * 900 + json.dumps(token).encode() + b"]" * 900,
            b"[" * 100_000 + token.encode(),
            b"\0" * 10_000_000 + token.encode(),
            pickle.dumps(trace),
            str(int.from_bytes(token.encode(), "big")).encode(),
            f"null{' ' * int(token[-6:])}".encode(),
            f"[]{' ' * int(token[-6:])}".encode(),
            f"{{}}{' ' * int(token[-6:])}".encode(),
            b" " * int(token[-6:]),
        )
    )
