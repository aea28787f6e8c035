"""The conversation that the spans of a run show together, each piece once.

The input of each call of a model repeats the entire conversation, and the result of a tool is both in its own span and in the
next input. So a piece counts where it occurs first. Some servers number the calls of each answer anew, so one id may stand for
several calls. A call without an id is identified by its name and arguments, which may recur too.

All of this takes time in proportion to the size of the spans, whatever they hold.
"""

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kp_scorer.adapters.node import as_json
from kp_scorer.adapters.pieces import Piece, call_input
from kp_scorer.adapters.span import Span

_EMPTY: Final = ("", "{}", "null")
_RECENT: Final = 8  # A prompt may repeat as many of the newest pieces in words of its own.


def last_turn(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces from the last message of the user on, with those of the user just before it."""
    start = max((place for place, piece in enumerate(pieces) if piece.kind == "user"), default=0)
    while start and pieces[start - 1].kind == "user":
        start -= 1
    return list(pieces[start:])


@dataclass(eq=False, slots=True)
class _Call:
    place: int  # Its position among the pieces.
    name: str
    call_id: str
    by_tool_alone: bool = False  # True if only the span of a tool has the call, and no model's.
    started_ns: int = 0  # When the tool began, if no model had called it yet.
    has_begun: bool = False  # True if the tool has begun.
    ended_ns: int = 0  # When the tool ended.
    result: int | None = None  # The position of its result among the pieces.


class _Queues:
    """The open calls by each of several keys, in their order."""

    def __init__(self, is_open: Callable[[_Call], bool]) -> None:
        """Hold calls as long as ``is_open`` is true for them. Once it is false for a call, it must stay false."""
        self._is_open = is_open
        self._by_key: defaultdict[tuple[str, ...], deque[_Call]] = defaultdict(deque)

    def add(self, call: _Call, *keys: tuple[str, ...]) -> None:
        for key in keys:
            self._by_key[key].append(call)

    def first(self, *key: str) -> _Call | None:
        calls = self._by_key[key]
        while calls and not self._is_open(calls[0]):
            calls.popleft()
        return calls[0] if calls else None


class _History:
    def __init__(self) -> None:
        self.pieces: Sequence[Piece] = []
        self.texts: Counter[tuple[str, str]] = Counter()
        self.ids: set[str] = set()  # The ids of its calls.
        self.calls: set[_Call] = set()  # The same calls in the conversation.
        self.answered: set[_Call] = set()
        self.open = _Queues(lambda call: call not in self.answered)


class Conversation:
    """The pieces of a run so far, and which of its calls have begun or ended."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.context: slice | None = None  # The places of the pieces of earlier turns, once a list of messages has come.
        self._before: defaultdict[int, list[Piece]] = defaultdict(
            list
        )  # By place: what the agent said before a call, if known later.
        self._has_answer = False  # Whether a model has answered.
        self._texts: Counter[tuple[str, str]] = Counter()  # The number of pieces with each text.
        self._call_words: dict[
            int, tuple[Piece, str]
        ] = {}  # By the ``id`` of a piece. The piece is kept, or another could get its ``id``.
        self._calls: defaultdict[tuple[str, ...], list[_Call]] = defaultdict(list)  # By id, by words, and by both.
        self._unanswered = _Queues(lambda call: call.result is None)
        self._waiting = _Queues(lambda call: not call.has_begun and call.result is None)
        self._of_tools = _Queues(lambda call: call.by_tool_alone)
        self._of_span: dict[int, _Call] = {}
        self._history = _History()
        self._has_several = False  # True if an id stands for several calls: then only an entire list distinguishes them.

    def turn(self) -> list[Piece]:
        """Return the pieces since the user spoke last, in their order."""
        context = range(self.context.start, self.context.stop) if self.context else ()
        places = (place for place in range(len(self.pieces)) if place not in context)
        return [piece for place in places for piece in (*self._before.get(place, ()), self.pieces[place])]

    def add(self, number: int, span: Span, *, is_end: bool, has_failed: bool) -> None:
        """Add what the beginning or the end of a span shows. ``has_failed`` if a record of the same call within it failed."""
        match span.kind, is_end:
            case "event", True:
                self.pieces += span.outputs
            case "model", True:
                self._add_answer(span)
                self._has_answer = self._has_answer or any(piece.kind in ("agent", "call") for piece in span.outputs)
            case "model", False:
                before = len(self.pieces)
                self._add_history(span.inputs)
                if self.context is None and span.inputs:
                    self.context = slice(before, len(self.pieces) - len(last_turn(self.pieces[before:])))
            case "tool", True:
                for piece in span.outputs:
                    self._add_result(self._of_span[number], piece._replace(is_error=piece.is_error or has_failed))
            case "tool", False:
                (piece,) = span.inputs
                self._of_span[number] = self._begin_tool(piece, span)

    def _add_history(self, pieces: Sequence[Piece]) -> None:
        """Add the new pieces of a conversation. It repeats all earlier pieces, each as often as it occurred."""
        new, matches = self._new_in(pieces)
        history, matched = self._history, iter(matches)
        is_prompt = self._is_prompt(pieces, matches)
        history.pieces = pieces
        history.calls.update(filter(None, matches))
        texts: list[Piece] = []  # Those of the agent that have come since the last piece of another kind.
        for piece in new:
            if piece.kind != "agent":
                before = next(matched, None) if piece.kind == "call" else None
                (self._before[before.place] if before else self.pieces).extend(texts)
                texts.clear()
            if piece.kind == "call":
                call = before or self._new(piece)
                history.ids.add(self._id(piece))
                history.open.add(call, ("id", piece.call_id), ("id", call.call_id), ("name", piece.name), ("any",))
            elif piece.kind == "result" and (call_before := history.open.first(*_key(piece))):
                history.answered.add(call_before)
                self._add_result(call_before, piece)
            elif piece.kind == "result" and self._calls.get((piece.call_id,)):
                # The call may be in the beginning that a list lacks. Otherwise it has a result already.
                cut_off = self._unanswered.first("id", piece.call_id)
                if cut_off and piece.call_id not in history.ids and cut_off not in history.calls:
                    self._add_result(cut_off, piece)
            elif piece.kind == "result" and not piece.call_id and (call_open := self._unanswered.first("any")):
                self._add_result(call_open, piece)
            else:
                text = piece.kind, piece.text.strip()
                history.texts[text] += 1
                if history.texts[text] > self._texts[text]:
                    self._texts[text] += 1
                    if not (is_prompt or self._is_retold(piece)):
                        (texts if piece.kind == "agent" else self.pieces).append(piece)
        self.pieces += texts

    def _is_prompt(self, pieces: Sequence[Piece], matches: Sequence[_Call | None]) -> bool:
        """Return whether a program wrote a list of messages that begins anew while the agent is at work."""
        if not self._has_answer:
            return False
        if all(piece.kind == "user" for piece in pieces):
            return True
        return not (any(matches) or any((piece.kind, piece.text.strip()) in self._texts for piece in pieces))

    def _is_retold(self, piece: Piece) -> bool:
        """Return whether a text in a list repeats a result, a call or an answer, as a protocol of texts does."""
        if piece.kind == "result" and self._calls and not piece.call_id:
            return True
        for each in self.pieces[-_RECENT:]:
            text = each.text.strip()
            if piece.kind == each.kind == "result" and text == piece.text.strip():
                return True
            if piece.kind == "user" and each.kind == "result" and text and text in piece.text:
                return True
            if piece.kind == "agent" and (
                (each.kind == "call" and each.call_id and each.call_id in piece.text)
                or (each.kind == "agent" and piece.text.strip().startswith(text))
            ):
                return True
        return False

    def _new_in(self, pieces: Sequence[Piece]) -> tuple[Sequence[Piece], list[_Call | None]]:
        """Return the pieces that the previous list lacks, or all of them, and for each call its match in the conversation."""
        before = len(self._history.pieces)
        # Compare by identity: a piece holds its message, so equality would compare each message once for each of its pieces.
        if not self._has_several and before <= len(pieces) and all(map(operator.is_, pieces, self._history.pieces)):
            new = pieces[before:]
            calls = [piece for piece in new if piece.kind == "call"]
            ids = list(map(self._id, calls))
            if len(set(ids)) == len(ids) and self._history.ids.isdisjoint(ids):
                return new, self._matches(calls)
        self._history = _History()
        return pieces, self._matches([piece for piece in pieces if piece.kind == "call"])

    def _matches(self, calls: Sequence[Piece]) -> list[_Call | None]:
        # Find for each call in a list of messages the same call of the conversation, if any. A list may lack its beginning, so
        # its calls are the newest ones. Two calls of one id and name are the same even if their arguments differ, as exporters
        # rephrase those, unless the id occurs more often than before.
        ids = Counter(map(self._id, calls))
        keys = Counter((self._id(call), self._words(call)) for call in calls)
        words = Counter(map(self._words, calls))
        # Gemini numbers the calls of an answer, but not in the conversation that repeats it.
        last = {own: iter(self._calls[own,][-count:]) for own, count in ids.items()}
        alike = {key: iter(self._calls[key][-count:]) for key, count in keys.items()}
        rephrased = {text: iter(self._calls[text,][-count:]) for text, count in words.items()}
        matches = []
        for call in calls:
            own = self._id(call)
            at_its_place = next(last[own], None)
            if at_its_place:
                # A tool that is retried has more calls than the model made.
                at_its_place.by_tool_alone = False
            same = next(alike[own, self._words(call)], None)
            # The conversation may have ids of its own, or the only ones.
            renumbered = next(rephrased[self._words(call)], None)
            renumbered = renumbered if renumbered and renumbered.call_id not in ids else None
            at_its_place = at_its_place if at_its_place and at_its_place.name == call.name else None
            matches.append(same or at_its_place or renumbered)
        return matches

    def _add_answer(self, span: Span) -> None:
        """Add an answer of a model. All of it is new, except a call whose tool has begun, and a call that is still open."""
        if any(piece.kind == "user" for piece in span.outputs):
            # It is the conversation with the answer, or what prepares a call.
            self._add_history(span.outputs)
            return
        for piece in span.outputs:
            if piece.kind == "call":
                call = self._still_open(piece) or self._begun_within(span, piece) or self._new(piece)
                call.by_tool_alone = False
                # The span of a tool may have the arguments in another form.
                self.pieces[call.place] = piece._replace(latency_ms=self.pieces[call.place].latency_ms)
                self._add_words(call, piece)
            elif piece.kind == "result" and self._calls.get((piece.call_id,)):
                if unanswered := self._unanswered.first("id", piece.call_id):
                    self._add_result(unanswered, piece)
            else:
                self._add_text(piece)

    def _still_open(self, piece: Piece) -> _Call | None:
        """Return the call that one in an answer repeats: its tool has begun already, or it has no result yet."""
        own = piece.call_id
        started = [call for call in self._calls[own,][-1:] if call.by_tool_alone and call.name == piece.name]
        alike = [call for call in self._calls[own, self._words(piece)][-1:] if call.result is None]
        return next(iter(started + alike), None) if own else None

    def _begun_within(self, span: Span, piece: Piece) -> _Call | None:
        """Return the call that one in an answer repeats: its tool began before the answer ended, and one of them has no id."""
        for key in (("words", self._words(piece)), ("name", piece.name)):
            call = self._of_tools.first(*key)
            has_ids = piece.call_id and call and call.call_id
            if call and call.started_ns >= span.started_ns and (key[0] == "words" or not has_ids):
                self._add_keys(call, piece)
                return call
        return None

    def _begin_tool(self, piece: Piece, span: Span) -> _Call:
        """Return the call that a tool carries out: by its id, or else by its name and arguments, or else by its name."""
        if piece.call_id:
            call = (
                self._waiting.first("id", piece.call_id, piece.name)
                or self._unanswered.first("id", piece.call_id, piece.name)
                or self._waiting.first("id", piece.call_id)
                or self._waiting.first("name", piece.name, "")
                # Frameworks may give the calls that they carry out ids of their own, and leave out the arguments.
                or self._waiting.first(*(("name", piece.name) if piece.arguments is None else ("words", self._words(piece))))
                or self._running(piece, span)
            )
        else:
            call = self._waiting.first("words", self._words(piece)) or self._waiting.first("name", piece.name)
            call = call or self._running(piece, span)
        if not call:
            # No model has called it yet, or the tool is retried.
            call = self._new(piece)
            call.by_tool_alone, call.started_ns = True, span.started_ns
        if self.pieces[call.place].arguments is None:
            self.pieces[call.place] = self.pieces[call.place]._replace(arguments=piece.arguments)
        if span.ended_ns is not None:
            call.ended_ns = span.ended_ns
            latency_ms = max(0, span.ended_ns - span.started_ns) / 1_000_000
            self.pieces[call.place] = self.pieces[call.place]._replace(latency_ms=latency_ms)
        call.has_begun = True
        return call

    def _running(self, piece: Piece, span: Span) -> _Call | None:
        """Return the call of the same words that another span still carries out, unless each has an id."""
        calls = self._calls[self._words(piece),][-1:]
        return next((call for call in calls if call.ended_ns > span.started_ns and not (call.call_id and piece.call_id)), None)

    def _new(self, piece: Piece) -> _Call:
        call = _Call(len(self.pieces), piece.name, piece.call_id)
        self.pieces.append(piece)
        self._add_keys(call, piece)
        return call

    def _add_words(self, call: _Call, piece: Piece) -> None:
        if call not in self._calls[self._words(piece),][-1:]:
            self._calls[self._words(piece),].append(call)

    def _add_keys(self, call: _Call, piece: Piece) -> None:
        own, words = self._id(piece), self._words(piece)
        self._add_words(call, piece)
        if piece.call_id:
            self._calls[own,].append(call)
        self._has_several = self._has_several or len(self._calls[own,]) > 1
        self._calls[own, words].append(call)
        for queues in (self._unanswered, self._waiting, self._of_tools):
            queues.add(call, ("id", piece.call_id), ("id", piece.call_id, piece.name), ("any",))
            queues.add(call, ("name", piece.name), ("name", piece.name, piece.call_id), ("words", words))

    def _add_result(self, call: _Call, piece: Piece) -> None:
        if call.result is None:
            call.result = len(self.pieces)
            self.pieces.append(piece)
        elif self.pieces[call.result].text in _EMPTY and piece.text not in _EMPTY:
            # Some spans of tools lack the result.
            is_error = piece.is_error or self.pieces[call.result].is_error
            self.pieces[call.result] = piece._replace(is_error=is_error)

    def _add_text(self, piece: Piece) -> None:
        self._texts[piece.kind, piece.text.strip()] += 1
        self.pieces.append(piece)

    def _id(self, call: Piece) -> str:
        return call.call_id or self._words(call)

    def _words(self, call: Piece) -> str:
        """Return the name and arguments of a call as a text, which is made once for each piece."""
        if id(call) not in self._call_words:
            self._call_words[id(call)] = call, f"{call.name}({as_json(call_input(call))})"
        return self._call_words[id(call)][1]


def _key(result: Piece) -> tuple[str, ...]:
    """Return the key of the call of a result in a list of messages: by its id, or else by its name."""
    if result.call_id:
        return "id", result.call_id
    return ("name", result.name) if result.name else ("any",)
