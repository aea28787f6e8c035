"""Items of a queue's Redis list: good messages, and what careless producers make of them."""

import base64
import json
import pickle
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kp_scorer.broker.wire import TASK_NAME

from tests.fuzz.mutations import base_texts, damaged, mutated_payload, odd_value
from tests.support.attacks import ENCODINGS, GZIP, HEADERS, REDIS_PROPERTIES, TASKS, TYPES, VALUES

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
_CONTENT_TYPES: Final[tuple[Any, ...]] = (*TYPES, "application/JSON", "json", "\0", None, 5, [])
_ENCODINGS: Final[tuple[Any, ...]] = (*ENCODINGS, "binary", "latin-1", "no-such-encoding", "", None, 5, [])
_TASKS: Final[tuple[Any, ...]] = (
    *("score", "Score_Trace", "celery.accumulate", "celery.chord_unlock", "celery.map", "kp_scorer.process.tasks.score_trace"),
    *(*TASKS, " ", "__proto__", "\ud800"),
)
_ODD: Final[tuple[Any, ...]] = (*VALUES, {}, [], "", "\0", "\ud800", "x" * 100_000, -1, "yesterday", [[], []])
_ODD_HEADERS: Final = dict.fromkeys(HEADERS, _ODD) | {"task": _TASKS, "compression": (GZIP, "zlib", "no-such", 5, [])}
_ODD_PROPERTIES: Final = dict.fromkeys(REDIS_PROPERTIES, _ODD) | {
    "delivery_info": ({"exchange": "no-such", "routing_key": 5}, {"priority": "x"}, {"exchange": None}, *_ODD),
    "body_encoding": ("BASE64", "utf-8", *_ODD),
    "delivery_tag": ("one-tag-for-all", *_ODD),
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


def bodies(count: int, seed: int) -> Iterator[Raw]:
    """Messages that are messages, with odd traces, bodies, headers and content types; some are left as they are."""
    yield from _made(count, seed, (_intact, _odd_trace, _odd_body, _odd_header, _odd_type, _old_protocol, _deep))


def garbage(count: int, seed: int) -> Iterator[Raw]:
    """Items that are no messages at all, or broken ones; some are good."""
    yield from _made(count, seed, (_intact, _odd_envelope, _odd_property, _damaged, _damaged_base64, _no_envelope))


_Make = Callable[[random.Random, dict[str, Any], str], Any]


def _made(count: int, seed: int, makers: tuple[_Make, ...]) -> Iterator[Raw]:
    bases = base_texts()
    for number in range(count):
        chance = random.Random(f"{seed}:{number}")
        token = f"fuzz-{seed}-{number:06}"
        trace = json.loads(chance.choice(bases)) | {"id": f"kp:trace:{token}"}
        made = makers[number % len(makers)](chance, trace, token)
        yield Raw(made if isinstance(made, bytes) else json.dumps(made).encode("utf-8", "surrogatepass"), trace["id"])


def _intact(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    return message(trace, token)


def _odd_trace(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    return message(mutated_payload(chance, json.dumps(trace)), token)


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


def _odd_header(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    return _with_odd(chance, message(trace, token), "headers", _ODD_HEADERS)


def _odd_property(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    return _with_odd(chance, message(trace, token), "properties", _ODD_PROPERTIES)


def _with_odd(chance: random.Random, made: Envelope, part: str, choices: Mapping[str, tuple[Any, ...]]) -> Envelope:
    name = chance.choice(list(choices))
    if chance.random() < 0.2:
        made[part].pop(name, None)
    else:
        made[part][name] = chance.choice(choices[name])
    return made


def _odd_type(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    made = message(trace, token)
    match chance.randrange(4):
        case 0:
            made["content-type"] = chance.choice(_CONTENT_TYPES)
        case 1:
            made["content-encoding"] = chance.choice(_ENCODINGS)
        case 2:
            made |= {"content-type": "application/x-python-serialize", "content-encoding": "binary"}
            made["body"] = base64.b64encode(pickle.dumps([[trace], {}, {}])).decode()
        case _:
            made["body"] = base64.b64encode(zlib.compress(base64.b64decode(made["body"]))).decode()
            if chance.random() < 0.5:
                made["headers"]["compression"] = GZIP
    return made


def _old_protocol(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    """What Celery 3 and gocelery send: the task is named in the body."""
    body: Any = {"task": TASK_NAME, "id": token, "args": [trace], "kwargs": {}, "retries": 0, "expires": None, "utc": True}
    if chance.random() < 0.7:
        body = mutated_payload(chance, json.dumps(body))
    return message(None, token) | {"headers": {}, "body": encoded(body)}


def _deep(chance: random.Random, trace: dict[str, Any], token: str) -> Envelope:
    """Nesting about as deep as Python can parse: just under what stops the parser, it must not stop what comes after."""
    made = message(None, token)
    depth = chance.choice((*range(880, 1_000, 4), 2_000, 20_000))
    inside = "[" * depth + json.dumps(token) + "]" * depth
    body = f'[[{{"id": {json.dumps(trace["id"])}, "input": {inside}}}], {{}}, {{}}]'
    return made | {"body": base64.b64encode(body.encode()).decode()}


def _odd_envelope(chance: random.Random, trace: dict[str, Any], token: str) -> Any:
    return mutated_payload(chance, json.dumps(message(trace, token)))


def _damaged(chance: random.Random, trace: dict[str, Any], token: str) -> bytes:
    return damaged(chance, json.dumps(message(trace, token)).encode())


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
