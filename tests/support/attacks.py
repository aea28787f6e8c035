"""What someone may put on the queue of traces who may do nothing else. Whatever can quote it must not: it holds a marker."""

import json
import pickle
import uuid
import zlib
from collections.abc import Iterator, Mapping
from itertools import cycle
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kp_scorer.broker.task_body import PACKED_BY
from kp_scorer.broker.task_message import TASK_NAME

from tests.support.bombs import GZIP, bombs
from tests.support.traces import short_traces

MARKER: Final = "Xylophonia"
MEGABYTE: Final = 1_000_000
ELSEWHERE: Final = "payments"
"""A queue that is none of the worker's business."""

_SIGNATURE: Final = {
    "task": f"pay.{MARKER}",
    "args": [MARKER],
    "kwargs": {},
    "options": {"queue": ELSEWHERE, "task_id": MARKER},
    "subtask_type": None,
    "immutable": True,
}
_LATER: Final = "2099-01-01T00:00:00+00:00"
_LONG_AGO: Final = "2001-01-01T00:00:00"
VALUES: Final[tuple[Any, ...]] = (
    *(None, False, 0, 1_000, 2**62, f"{MARKER}\n\x1b[31m{MARKER * 100}", _LATER, _LONG_AGO),
    *([1], [MARKER, 1], [_SIGNATURE], [[_SIGNATURE] * 3], {MARKER: MARKER}, _SIGNATURE),
    {"__type__": "datetime", "__value__": MARKER},
)
_HEADERS: Final = (
    *("lang", "id", "root_id", "parent_id", "group", "group_index", "meth", "shadow", "eta", "expires", "retries", "timelimit"),
    *("argsrepr", "kwargsrepr", "origin", "ignore_result", "replaced_task_nesting", "stamped_headers", "stamps", "utc", "args"),
    *(
        "kwargs",
        "callbacks",
        "errbacks",
        "chain",
        "chord",
        "link",
        "taskset",
        "hostname",
        "is_eager",
        "called_directly",
        "reply_to",
    ),
    *(
        "correlation_id",
        "delivery_info",
        "redelivered",
        "x-delivery-count",
        "x-death",
        PACKED_BY,
        "priority",
        "headers",
    ),
    *("properties", "loglevel", "logfile", "message", "received_s", "ticket", "clock", "content-type", "content_encoding"),
    *("sent_ms", "traceparent", "tracestate"),
)
_EMBED: Final = ("callbacks", "errbacks", "chain", "chord", "link", "message", "delivery_info", "ignore_result", "id")
_OLD_FIELDS: Final = (
    *("id", "retries", "eta", "expires", "utc", "timelimit", "taskset", "group", "chord", "callbacks", "errbacks", "shadow"),
    *("root_id", "parent_id", "meth", "argsrepr", "kwargsrepr", "origin", "headers", "chain", "ignore_result"),
)
_TASKS: Final = ("", MARKER, f"pay.{MARKER}", "celery.backend_cleanup", "celery.chain", [TASK_NAME], {TASK_NAME: 1}, None, 5)
_TYPES: Final = ("application/x-python-serialize", "application/data", "application/x-yaml", "text/plain", MARKER, "")
_ENCODINGS: Final = ("bz2_codec", "zlib_codec", "punycode", "utf-16", "unicode_escape", "idna", "rot13", "base64", MARKER)


class Attack(NamedTuple):
    """A message, whatever carries it."""

    trace_id: str
    """Of the trace that is decided nevertheless; empty if the message must become a dead letter."""
    body: bytes
    headers: dict[str, Any]
    properties: Mapping[str, Any] = MappingProxyType({})
    content_type: Any = "application/json"
    content_encoding: Any = "utf-8"
    dead_id: str = ""
    """Of the trace that is dead by it: what is too costly to be parsed goes by the id in its headers, if it has any."""


def attacks() -> Iterator[Attack]:
    """All of them, that both brokers can carry."""
    traces = iter(short_traces(5_000, seed=11))
    makers = (_odd_headers, _odd_embeds, _odd_fields_of_old, _odd_contents, _packed, _results, _tasks_of_others, _copies)
    for make in (*makers, bare):
        yield from make(_with_marker(trace) for trace in traces)


def plain() -> Iterator[Attack]:
    """Messages as they should be, to be made attacks of."""
    return (_attack(trace, {}) for trace in marked(1_000, seed=12))


def marked(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Short traces with a marker in each."""
    return map(_with_marker, short_traces(count, seed))


def squatting(trace: dict[str, Any]) -> Attack:
    """Other content under the id of somebody else's trace."""
    return _attack(_with_marker({**trace, "task": {"objective": "mine"}}), {})._replace(trace_id="")


def _with_marker(trace: dict[str, Any]) -> dict[str, Any]:
    trace["task"]["objective"] += f" {MARKER}"
    return trace


Traces = Iterator[dict[str, Any]]


def _odd_headers(traces: Traces) -> Iterator[Attack]:
    for name in _HEADERS:
        for value in VALUES:
            yield _attack(next(traces), {name: value})


def _odd_embeds(traces: Traces) -> Iterator[Attack]:
    for name in _EMBED:
        for value in VALUES:
            yield _attack(next(traces), {}, embed={name: value})
    for embed in VALUES:
        yield _attack(next(traces), {}, embed=embed)


def _odd_fields_of_old(traces: Traces) -> Iterator[Attack]:
    """What the first version of the protocol has in the body."""
    for name in _OLD_FIELDS:
        for value in VALUES:
            trace = next(traces)
            fields = {"task": TASK_NAME, "id": str(trace["id"]), "args": [trace], "kwargs": {}, name: value}
            yield Attack(str(trace["id"]), json.dumps(fields).encode(), {})


def _odd_contents(traces: Traces) -> Iterator[Attack]:
    for content_type in _TYPES:
        yield _attack(next(traces), {})._replace(trace_id="", content_type=content_type)
    for encoding in _ENCODINGS:
        yield _attack(next(traces), {})._replace(content_encoding=encoding)
    bodies = (pickle.dumps([[MARKER], {}, {}]), MARKER.encode(), b"\xff\xfe" + MARKER.encode("utf-16-le"))
    for body in (*bodies, f"[[1], {MARKER!r}, {{}}]".encode()):
        yield _attack(next(traces), {})._replace(trace_id="", body=body)
    for body in (b"[" * 100_000, b"9" * 5_000):
        yield _refused(_attack(next(traces), {})._replace(body=body))
    # Beyond what any valid trace can be.
    yield _refused(_attack(next(traces) | {"mood": MARKER * 500_000}, {}))


def _packed(traces: Traces) -> Iterator[Attack]:
    attack = _attack(next(traces), {"compression": GZIP})
    yield attack._replace(body=zlib.compress(attack.body))
    yield attack._replace(trace_id="", body=zlib.compress(attack.body)[:-10])
    # The name that the header has only once a message is here.
    gzip = {PACKED_BY: GZIP}
    yield _attack(next(traces), gzip)
    alone = _attack(next(traces), gzip)
    yield alone._replace(trace_id="", body=zlib.compress(alone.body))
    for other in (*gzip.values(), "brotli", [MARKER]):
        beside = _attack(next(traces), {"compression": GZIP, PACKED_BY: other})
        yield beside._replace(body=zlib.compress(beside.body))
    for compression in (GZIP, "application/x-bz2", "application/x-lzma", "brotli", MARKER, [MARKER], 5):
        bomb = bombs().get(str(compression), MARKER.encode())
        attack = _attack(next(traces), {"compression": compression})._replace(body=bomb)
        attack = _refused(attack) if compression == GZIP else attack._replace(trace_id="")
        yield attack
        yield attack._replace(headers={**attack.headers, "shadow": [1], "ignore_result": False})
    for name, bomb in bombs().items():
        codec = {GZIP: "zlib_codec", "application/x-bz2": "bz2_codec"}.get(name, "punycode")
        yield _attack(next(traces), {})._replace(
            trace_id="", body=bomb, content_type="application/data", content_encoding=codec
        )


def _results(traces: Traces) -> Iterator[Attack]:
    """Calls whose result is asked for, by an id as Celery makes them and by others."""
    for task_id in (str(uuid.uuid4()), "order-17", str(uuid.uuid4()).upper()):
        yield _attack(next(traces), {"id": task_id, "ignore_result": False})


def _tasks_of_others(traces: Traces) -> Iterator[Attack]:
    for task in _TASKS:
        yield _attack(next(traces), {"task": task})._replace(trace_id="")


def bare(traces: Traces) -> Iterator[Attack]:
    """Bodies that are traces, or seem to be, and call no task."""
    beside = ("args", "kwargs", "body", "properties", "__type__", "@graph", *_OLD_FIELDS)
    for name, value in zip(beside, cycle(VALUES), strict=False):
        yield _bare({name: value, **next(traces)})
    for headers in ({"id": str(uuid.uuid4()), "ignore_result": False}, {"callbacks": [_SIGNATURE]}, {"args": [MARKER]}):
        yield _bare(next(traces))._replace(headers=headers)
    for field in ("@type", "@context", "task", "metadata"):
        yield _refused(_bare({**next(traces), field: [MARKER]}))
    for body in ({MARKER: MARKER}, {"trace": {MARKER: 1}}, {"@type": MARKER, "args": [{}], "kwargs": {}, "task": TASK_NAME}):
        yield Attack("", json.dumps(body).encode(), {})
    for item in ("{}", "9" * 5_000, f'"{MARKER}"'):
        yield Attack("", f'{{"{MARKER}":[{",".join([item] * (MEGABYTE // len(item)))}]}}'.encode(), {})


def _copies(traces: Traces) -> Iterator[Attack]:
    yield from [_attack(next(traces), {})] * 40


def _attack(trace: dict[str, Any], headers: dict[str, Any], embed: Any = None) -> Attack:
    body = json.dumps([[trace], {}, embed]).encode()
    return Attack(str(trace["id"]), body, {"task": TASK_NAME, "id": str(trace["id"]), **headers})


def _bare(trace: dict[str, Any]) -> Attack:
    # As a dead letter has it.
    return Attack(str(trace["id"]), json.dumps(trace, ensure_ascii=False).encode(), {})


def _refused(attack: Attack) -> Attack:
    return attack._replace(trace_id="", dead_id=attack.trace_id)
