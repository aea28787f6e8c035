"""A run that is told as spans: what each call of a model was shown and put out, and what each tool did, brought to one order.

Each call of a model is shown the whole conversation again, and what a tool returned is told by its own span and by the next
call's input. So a piece counts where it comes up first.

Some servers number the calls of each answer anew, so an id may stand for several calls: each is known by its id and a number.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
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
        """Where each call is among the pieces, by its key: its id and a number, or one made for a call that has no id."""
        self._of_id: defaultdict[str, list[str]] = defaultdict(list)
        """The keys of the calls with an id, by that, in their order."""
        self._alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        """The same, by the id and the call itself."""
        self._same: Counter[str] = Counter()
        self._waiting: dict[str, Called] = {}
        """The calls that no tool has begun or answered yet."""
        self._untold: set[str] = set()
        """The calls of which only a tool has told, no model."""
        self._returned: set[str] = set()
        self._key_of_span: dict[int, str] = {}

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

    def _show(self, pieces: Sequence[Piece]) -> None:
        """A conversation so far: all that was known before is in it again, as often as it was said."""
        told: Counter[tuple[type, str]] = Counter()
        same: Counter[str] = Counter()
        known = self._known_of([piece for piece in pieces if isinstance(piece, Called) and piece.call_id])
        found = iter(known)
        last: dict[str, str] = {}
        waiting: dict[str, Called] = {}
        for piece in pieces:
            if isinstance(piece, Called):
                key = (next(found) or self._new(piece)) if piece.call_id else _made_key(piece, same)
                waiting[key] = piece
                last[piece.call_id] = key
                self._call(piece, key)
            elif isinstance(piece, Returned) and (answered := _first_waiting(waiting, piece)):
                waiting.pop(answered)
                self._return(piece, answered)
            elif isinstance(piece, Returned) and piece.call_id:
                self._return(piece, last.get(piece.call_id) or self._first_open(piece.call_id, besides=known))
            else:
                key_of_text = type(piece), piece.text.strip()
                told[key_of_text] += 1
                if told[key_of_text] > self._told[key_of_text]:
                    self._told[key_of_text] += 1
                    self.pieces.append(piece)
        self._same |= same

    def _known_of(self, calls: Sequence[Called]) -> list[str | None]:
        """For each call with an id in a list of messages the one that is known already; None if it is new.

        A list may lack what came first, so its calls are the last of those that are known. One is the same if nothing but its
        arguments differs, which may be recorded in other words, unless its id comes up more often than it is known.
        """
        often = Counter(call.call_id for call in calls)
        # Only where an id is not one call's alone is there anything to compare.
        written = [_with_id(call) if max(often[call.call_id], len(self._of_id[call.call_id])) > 1 else None for call in calls]
        alike = {call: iter(self._alike[call][-count:]) for call, count in Counter(filter(None, written)).items()}
        of_id = {own: iter(self._of_id[own][-count:]) for own, count in often.items()}
        known = []
        for call, key in zip(calls, written, strict=True):
            at_its_place = next(of_id[call.call_id], None)
            # A tool that was tried again is known by more calls than the model made.
            self._untold.discard(at_its_place or "")
            found = next(alike[key], None) if key else None
            known.append(found or (at_its_place if at_its_place and self._is_named(at_its_place, call.name) else None))
        return known

    def _put_out(self, pieces: Iterable[Piece]) -> None:
        """What a model says now: all of it is new, but for a call whose tool has begun already, or that is still open."""
        for piece in pieces:
            if isinstance(piece, Called):
                key = (self._still_open(piece) or self._new(piece)) if piece.call_id else _made_key(piece, self._same)
                self._untold.discard(key)
                self._call(piece, key)
            elif isinstance(piece, Returned) and piece.call_id:
                self._return(piece, self._first_open(piece.call_id))
            else:
                self._told[type(piece), piece.text.strip()] += 1
                self.pieces.append(piece)

    def _still_open(self, call: Called) -> str | None:
        """The call that a model puts out, if it is known: begun by its tool before, or put out before and not answered."""
        for key in self._of_id[call.call_id][-1:]:
            if key in self._untold and self._is_named(key, call.name):
                return key
        return next((key for key in self._alike[_with_id(call)][-1:] if key not in self._returned), None)

    def _begin_tool(self, number: int, span: Span) -> None:
        for piece in span.told.shown:
            assert isinstance(piece, Called)
            key = self._call_of_id(piece) if piece.call_id else self._call_that(piece)
            if key is None and piece.call_id:
                # Not called by a model, or not yet; or called once, and tried once more.
                key = self._new(piece)
                self._untold.add(key)
            key = key or _made_key(piece, self._same)
            if key in self._calls:
                known = self.pieces[self._calls[key]]
                assert isinstance(known, Called)
                self.pieces[self._calls[key]] = known._replace(latency_ms=piece.latency_ms)
            self._call(piece, key)
            self._waiting.pop(key, None)
            self._key_of_span[number] = key

    def _end_tool(self, number: int, span: Span) -> None:
        for piece in span.told.made:
            assert isinstance(piece, Returned)
            self._return(piece, self._key_of_span[number])

    def _call_of_id(self, tool: Called) -> str | None:
        """The call that a tool with an id answers: open, of this name if there is one, and not begun if there is."""
        fits = {
            key: (self._is_named(key, tool.name), key in self._waiting)
            for key in self._of_id[tool.call_id]
            if key not in self._returned
        }
        return max((key for key, fit in fits.items() if any(fit)), key=fits.__getitem__, default=None)

    def _call_that(self, tool: Called) -> str | None:
        """The call that a tool without an id answers: of this name, not begun yet, and of these arguments if there is one."""
        found = [key for key, call in self._waiting.items() if call.name == tool.name]
        alike = (one for one in found if call_input(self._waiting[one].arguments) == call_input(tool.arguments))
        return next(alike, found[0] if found else None)

    def _first_open(self, call_id: str, besides: Collection[str | None] = ()) -> str:
        """The first call of an id, but for some, that has no result yet; the last if all have one."""
        keys = [key for key in self._of_id[call_id] if key not in besides]
        if not keys:
            # A result without its call: as that has a key too, it counts once.
            return self._new_key(call_id)
        return next((key for key in keys if key not in self._returned), keys[-1])

    def _is_named(self, key: str, name: str) -> bool:
        known = self.pieces[self._calls[key]] if key in self._calls else None
        # Of a result without its call no name is known.
        return not isinstance(known, Called) or known.name == name

    def _new(self, call: Called) -> str:
        """The key of one more call of an id."""
        key = self._new_key(call.call_id)
        self._alike[_with_id(call)].append(key)
        return key

    def _new_key(self, call_id: str) -> str:
        keys = self._of_id[call_id]
        keys.append(f"{call_id}#{len(keys) + 1}")
        return keys[-1]

    def _call(self, piece: Called, key: str) -> None:
        if key not in self._calls:
            self._calls[key] = len(self.pieces)
            self._waiting[key] = piece
            self.pieces.append(piece)

    def _return(self, piece: Returned, key: str) -> None:
        self._waiting.pop(key, None)
        if key not in self._returned:
            self._returned.add(key)
            self.pieces.append(piece)


def _with_id(call: Called) -> tuple[str, str]:
    return call.call_id, _written(call)


def _written(call: Called) -> str:
    return f"{call.name}({as_json(call_input(call.arguments))})"


def _made_key(call: Called, same: Counter[str]) -> str:
    """A key for a call that has no id: which of the calls with this name and these arguments it is."""
    written = _written(call)
    same[written] += 1
    return f"{written}#{same[written]}"


def _first_waiting(waiting: Mapping[str, Called], result: Returned) -> str | None:
    """The first call in a list of messages that has no result in it yet and fits a result: by its id, otherwise by its name."""
    if result.call_id:
        return next((key for key, call in waiting.items() if call.call_id == result.call_id), None)
    return next((key for key, call in waiting.items() if result.name in ("", call.name)), None)
