"""W3C Trace Context as text, for use without OpenTelemetry."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

Context = Mapping[str, str]  # The headers ``traceparent`` and perhaps ``tracestate``; empty if a message has none.

NO_CONTEXT: Final[Context] = MappingProxyType({})
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
TRACE_ID: Final = "kp_scorer.trace.id"  # The attribute of a span with the id of its ReasoningTrace, not its OpenTelemetry id.
_PARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_KEY: Final = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_VALUE: Final = r"[ -+\--<>-~]{0,255}[!-+\--<>-~]"
_STATE: Final = re.compile(rf"{_KEY}={_VALUE}(?:[ \t]*,[ \t]*{_KEY}={_VALUE}){{0,31}}")
_STATE_CHARS: Final = 512  # The standard requires that at least this many characters are passed on.


class Destination(NamedTuple):
    """A queue or a stream: the kind of its server, and its name there."""

    system: str
    name: str


def context_in(headers: Mapping[str, Any]) -> Context:
    """Return the context in a message's headers, which may hold anything; an invalid one counts as none."""
    parent, state = headers.get(TRACEPARENT), headers.get(TRACESTATE)
    if not isinstance(parent, str) or not _PARENT.fullmatch(parent):
        return NO_CONTEXT
    # Drop an invalid state, because OpenTelemetry would quote it in a warning.
    if isinstance(state, str) and len(state) <= _STATE_CHARS and _STATE.fullmatch(state):
        return {TRACEPARENT: parent, TRACESTATE: state}
    return {TRACEPARENT: parent}
