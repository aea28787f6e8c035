"""A run that is told as spans: what each call of a model was shown and put out, and what each tool did, brought to one order.

Each call of a model is shown the whole conversation again, and what a tool returned is told by its own span and by the next
call's input. So a piece counts where it comes up first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from kp_scorer.adapters.pieces import Asked, Called, Piece, Returned, Said, call_input
from kp_scorer.adapters.source import Node, as_json

Kind = Literal["model", "tool", "event", "other"]


class Told(NamedTuple):
    """What a span tells."""

    kind: Kind
    name: str
    """Of the tool; empty for a model."""
    shown: Sequence[Piece]
    """Of a model, what it was shown; of a tool, its call; of another span, what it was given."""
    made: Sequence[Piece]
    """Of a model, what it put out; of a tool, its result; of another span, what it gave."""


class Span(NamedTuple):
    """One span, or observation, of a run. Times are integers of one unit."""

    node: Node
    span_id: str
    parent_id: str
    started: int
    ended: int
    told: Told


def in_order(spans: Sequence[Span]) -> list[Piece]:
    """What happened, in the order of time.

    A call of a model within another, or of a tool within one of that name, is the same call told twice. Spans of other kinds
    only tell what was asked, if no model was shown a user's message, and what was answered, if no model said anything.
    """
    by_id = {span.span_id: span for span in spans if span.span_id}
    moments = [
        # Where times are equal, what began first comes first.
        ((time, span.started, number, is_end), span)
        for number, span in enumerate(spans)
        if span.told.kind != "other" and not _is_told_twice(span, by_id)
        for is_end, time in ((False, span.started), (True, max(span.started, span.ended)))
    ]
    run = _Conversation()
    for (_, _, number, is_end), span in sorted(moments, key=lambda moment: moment[0]):
        run.add(number, span, is_end=is_end)
    around = sorted((span for span in spans if span.told.kind == "other"), key=lambda span: span.started)
    asked = _first_of(Asked, (span.told.shown for span in around))
    said = _first_of(Said, (span.told.made for span in around))
    return [
        *(asked if not any(isinstance(piece, Asked) for piece in run.pieces) else []),
        *run.pieces,
        *(said if not any(isinstance(piece, Said) for piece in run.pieces) else []),
    ]


def _is_told_twice(span: Span, by_id: Mapping[str, Span]) -> bool:
    seen = {span.span_id}
    parent = by_id.get(span.parent_id)
    while parent and parent.span_id not in seen:
        is_alike = parent.told.kind == span.told.kind and parent.told.name == span.told.name
        if is_alike and (parent.told.shown or parent.told.made):
            return True
        seen.add(parent.span_id)
        parent = by_id.get(parent.parent_id)
    return False


def _first_of(kind: type[Piece], told: Iterable[Iterable[Piece]]) -> list[Piece]:
    return [piece for pieces in told for piece in pieces if isinstance(piece, kind)][:1]


class _Conversation:
    """What is known of a run so far, and the pieces that told it."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._told: Counter[tuple[type, str]] = Counter()
        self._calls: dict[str, int] = {}
        """Where each call is among the pieces, by its id, or by one made for a call that has none."""
        self._same: Counter[str] = Counter()
        self._waiting: dict[str, Called] = {}
        """The calls that no tool has begun or answered yet."""
        self._returned: set[str] = set()
        self._id_of_span: dict[int, str] = {}

    def add(self, number: int, span: Span, *, is_end: bool) -> None:
        """Go on to the beginning or the end of a span."""
        if span.told.kind == "event":
            self.pieces += span.told.made if is_end else []
        elif span.told.kind == "tool":
            if is_end:
                self._end_tool(number, span)
            else:
                self._begin_tool(number, span)
        elif is_end:
            self._put_out(span.told.made)
        else:
            self._show(span.told.shown)

    def _show(self, pieces: Iterable[Piece]) -> None:
        """A conversation so far: all that was known before is in it again, as often as it was said."""
        told: Counter[tuple[type, str]] = Counter()
        same: Counter[str] = Counter()
        waiting: dict[str, str] = {}
        for piece in pieces:
            if isinstance(piece, Called):
                call_id = piece.call_id or _made_id(piece, same)
                waiting[call_id] = piece.name
                if call_id not in self._calls:
                    self._call(piece, call_id)
            elif isinstance(piece, Returned) and (answered := piece.call_id or _first_waiting(waiting, piece.name)):
                waiting.pop(answered, None)
                self._return(piece, answered)
            else:
                key = type(piece), piece.text.strip()
                told[key] += 1
                if told[key] > self._told[key]:
                    self._told[key] += 1
                    self.pieces.append(piece)
        self._same |= same

    def _put_out(self, pieces: Iterable[Piece]) -> None:
        """What a model says now: all of it is new, but for a call whose tool has begun already."""
        for piece in pieces:
            if isinstance(piece, Called):
                call_id = piece.call_id or _made_id(piece, self._same)
                if call_id not in self._calls:
                    self._call(piece, call_id)
            elif isinstance(piece, Returned) and piece.call_id:
                self._return(piece, piece.call_id)
            else:
                self._told[type(piece), piece.text.strip()] += 1
                self.pieces.append(piece)

    def _begin_tool(self, number: int, span: Span) -> None:
        for piece in span.told.shown:
            assert isinstance(piece, Called)
            call_id = piece.call_id or self._call_that(piece)
            if call_id is None or call_id in self._returned:
                # Not called by a model; or called once, and tried once more.
                call_id = _made_id(piece, self._same)
            if call_id in self._calls:
                known = self.pieces[self._calls[call_id]]
                assert isinstance(known, Called)
                self.pieces[self._calls[call_id]] = known._replace(latency_ms=piece.latency_ms)
            else:
                self._call(piece, call_id)
            self._waiting.pop(call_id, None)
            self._id_of_span[number] = call_id

    def _end_tool(self, number: int, span: Span) -> None:
        for piece in span.told.made:
            assert isinstance(piece, Returned)
            self._return(piece, self._id_of_span[number])

    def _call_that(self, tool: Called) -> str | None:
        """The call that a tool without an id answers: of this name, not begun yet, and of these arguments if there is one."""
        found = [call_id for call_id, call in self._waiting.items() if call.name == tool.name]
        alike = (one for one in found if call_input(self._waiting[one].arguments) == call_input(tool.arguments))
        return next(alike, found[0] if found else None)

    def _call(self, piece: Called, call_id: str) -> None:
        self._calls[call_id] = len(self.pieces)
        self._waiting[call_id] = piece
        self.pieces.append(piece)

    def _return(self, piece: Returned, call_id: str) -> None:
        self._waiting.pop(call_id, None)
        if call_id not in self._returned:
            self._returned.add(call_id)
            self.pieces.append(piece)


def _made_id(piece: Called, same: Counter[str]) -> str:
    """An id for a call that has none: which of the calls with this name and these arguments it is."""
    call = f"{piece.name}({as_json(call_input(piece.arguments))})"
    same[call] += 1
    return f"{call}#{same[call]}"


def _first_waiting(waiting: Mapping[str, str], name: str) -> str | None:
    """The first call in a list of messages that has no result in it yet, of a tool of this name if there is one."""
    return next((call_id for call_id, tool in waiting.items() if name in ("", tool)), None)
