"""Puts together the conversation that the spans of a run show, each piece once.

The input of each call of a model repeats the entire conversation, and the result of a tool is both in its own span and in the
next input. So a piece counts where it occurs first.

All of this takes time in proportion to the size of the spans, whatever they hold.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kp_scorer.adapters.call_index import Call, Calls, Queues
from kp_scorer.adapters.pieces import Piece, free_call_id, has_kind
from kp_scorer.adapters.span import Span

_EMPTY: Final = ("", "{}", "null")
_RECENT: Final = 8  # A prompt may retell this many of the newest pieces in other words.


def last_turn(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces from the last message of the user on, with those of the user just before it."""
    start = max((place for place, piece in enumerate(pieces) if piece.kind == "user"), default=0)
    while start and pieces[start - 1].kind == "user":
        start -= 1
    return list(pieces[start:])


class _History:
    """The last list of messages, with which the next one may begin."""

    def __init__(self) -> None:
        self.pieces: Sequence[Piece] = []
        self.texts: Counter[tuple[str, str]] = Counter()
        self.ids: set[str] = set()  # The ids of the calls in the list.
        self.calls: set[Call] = set()  # The calls of the conversation that match them.
        self.answered: set[Call] = set()
        self.open = Queues(lambda call: call not in self.answered)


class Conversation:
    """The pieces of a run so far, and the state of its calls, which may have begun or ended."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._context: range | None = None  # The places of the pieces of earlier turns, once a list of messages has come.
        # The texts of the agent that belong before the call at a place, if they became known after the call.
        self._before: defaultdict[int, list[Piece]] = defaultdict(list)
        self._has_answer = False  # True once a model has answered.
        self._texts: Counter[tuple[str, str]] = Counter()  # The number of pieces with each text.
        self._calls = Calls()
        self._all_calls: list[Call] = []
        self._of_span: dict[int, Call] = {}
        self._history = _History()
        # Each new piece is compared with the same recent ones, which may be large.
        self._stripped = lru_cache(_RECENT)(str.strip)

    def turn(self) -> list[Piece]:
        """Return the pieces since the user spoke last, in their order; each result has the id of its call."""
        self._name_results()
        places = (place for place in range(len(self.pieces)) if place not in (self._context or ()))
        return [piece for place in places for piece in (*self._before.get(place, ()), self.pieces[place])]

    def add(self, number: int, span: Span, *, is_end: bool, has_failed: bool) -> None:
        """Add the pieces that the beginning or the end of a span shows.

        ``has_failed`` is true if another span within it, which records the same call, failed.
        """
        match span.kind, is_end:
            case "event", True:
                self.pieces += span.outputs
            case "model", True:
                self._add_answer(span)
                self._has_answer = self._has_answer or has_kind(span.outputs, "agent", "call")
            case "model", False:
                before = len(self.pieces)
                self._add_history(span.inputs)
                if self._context is None and span.inputs:
                    self._context = range(before, len(self.pieces) - len(last_turn(self.pieces[before:])))
            case "tool", True:
                for piece in span.outputs:
                    self._add_result(self._of_span[number], piece._replace(is_error=piece.is_error or has_failed))
            case "tool", False:
                (piece,) = span.inputs
                self._of_span[number] = self._begin_tool(piece, span)

    def _add_history(self, pieces: Sequence[Piece]) -> None:
        """Add the new pieces of a list of messages. The list repeats all earlier pieces, each as often as it occurred."""
        new, matches = self._new_in(pieces)
        history, matched = self._history, iter(matches)
        is_prompt = self._is_prompt(pieces, matches)
        history.pieces = pieces
        history.calls.update(filter(None, matches))
        texts: list[Piece] = []  # The agent's texts since the last piece of another kind.
        for piece in new:
            if piece.kind != "agent":
                before = next(matched, None) if piece.kind == "call" else None
                (self._before[before.place] if before else self.pieces).extend(texts)
                texts.clear()
            if piece.kind == "call":
                call = before or self._new(piece)
                history.ids.add(self._calls.identity_of(piece))
                history.open.add(call, ("id", piece.call_id), ("id", call.call_id), ("name", piece.name), ("any",))
            elif piece.kind == "result" and (call_before := history.open.first(*_key(piece))):
                history.answered.add(call_before)
                self._add_result(call_before, piece)
            elif piece.kind == "result" and self._calls.has(piece.call_id):
                # The call may be in the beginning that the list lacks. Otherwise it has a result already.
                cut_off = self._calls.unanswered.first("id", piece.call_id)
                if cut_off and piece.call_id not in history.ids and cut_off not in history.calls:
                    self._add_result(cut_off, piece)
            elif piece.kind == "result" and not piece.call_id and (call_open := self._calls.unanswered.first("any")):
                self._add_result(call_open, piece)
            else:
                text = piece.kind, piece.text.strip()
                history.texts[text] += 1
                if history.texts[text] > self._texts[text]:
                    self._texts[text] += 1
                    if not (is_prompt or self._is_retold(piece)):
                        (texts if piece.kind == "agent" else self.pieces).append(piece)
        self.pieces += texts

    def _is_prompt(self, pieces: Sequence[Piece], matches: Sequence[Call | None]) -> bool:
        """Return whether a list of messages is a program's prompt, which begins anew while the agent is at work."""
        if not self._has_answer:
            return False
        if all(piece.kind == "user" for piece in pieces):
            return True
        return not (any(matches) or any((piece.kind, piece.text.strip()) in self._texts for piece in pieces))

    def _is_retold(self, piece: Piece) -> bool:
        """Return whether a text in a list repeats a result, a call or an answer, as when an agent calls tools in its texts."""
        if piece.kind == "result" and self._calls and not piece.call_id:
            return True
        own_text = piece.text.strip()
        for each in self.pieces[-_RECENT:]:
            text = self._stripped(each.text)
            if piece.kind == each.kind == "result" and text == own_text:
                return True
            if piece.kind == "user" and each.kind == "result" and text and text in piece.text:
                return True
            if piece.kind == "agent" and (
                (each.kind == "call" and each.call_id and each.call_id in piece.text)
                or (each.kind == "agent" and own_text.startswith(text))
            ):
                return True
        return False

    def _new_in(self, pieces: Sequence[Piece]) -> tuple[Sequence[Piece], list[Call | None]]:
        """Return the pieces that the previous list lacks, or all of them, and for each call its match in the conversation."""
        before = len(self._history.pieces)
        # Compare by identity: a piece holds its message, so equality would compare each message once for each of its pieces.
        if not self._calls.has_several and before <= len(pieces) and all(map(operator.is_, pieces, self._history.pieces)):
            new = pieces[before:]
            calls = [piece for piece in new if piece.kind == "call"]
            ids = list(map(self._calls.identity_of, calls))
            if len(set(ids)) == len(ids) and self._history.ids.isdisjoint(ids):
                return new, self._calls.matches(calls)
        self._history = _History()
        return pieces, self._calls.matches([piece for piece in pieces if piece.kind == "call"])

    def _add_answer(self, span: Span) -> None:
        """Add an answer of a model. All of it is new, except a call whose tool has begun, and a call that is still open."""
        if has_kind(span.outputs, "user"):
            # The output is the conversation up to the answer, or the input of a call.
            self._add_history(span.outputs)
            return
        for piece in span.outputs:
            if piece.kind == "call":
                call = self._calls.still_open(piece) or self._calls.begun_within(span, piece) or self._new(piece)
                call.by_tool_alone = False
                # Show the call as the model made it: the span of the tool may have the arguments in another form.
                self.pieces[call.place] = piece._replace(latency_ms=self.pieces[call.place].latency_ms)
                self._calls.add_words(call, piece)
            elif piece.kind == "result" and self._calls.has(piece.call_id):
                if unanswered := self._calls.unanswered.first("id", piece.call_id):
                    self._add_result(unanswered, piece)
            else:
                self._texts[piece.kind, piece.text.strip()] += 1
                self.pieces.append(piece)

    def _begin_tool(self, piece: Piece, span: Span) -> Call:
        """Return the call that a tool carries out, and note its times and its arguments."""
        call = self._calls.carried_out_by(piece, span)
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

    def _new(self, piece: Piece) -> Call:
        call = Call(len(self.pieces), piece.name, piece.call_id)
        self.pieces.append(piece)
        self._calls.add(call, piece)
        self._all_calls.append(call)
        return call

    def _name_results(self) -> None:
        """Give each result the id of its call, and a call without one the next id that is free: spans of tools may lack ids."""
        own_ids = {piece.call_id for piece in self.pieces}
        for number, call in enumerate(self._all_calls, 1):
            if call.result is None:
                continue
            call_id = self.pieces[call.place].call_id or self.pieces[call.result].call_id or free_call_id(number, own_ids)
            for place in (call.place, call.result):
                self.pieces[place] = self.pieces[place]._replace(call_id=call_id)

    def _add_result(self, call: Call, piece: Piece) -> None:
        if call.result is None:
            call.result = len(self.pieces)
            self.pieces.append(piece)
        elif self.pieces[call.result].text in _EMPTY and piece.text not in _EMPTY:
            # Replace an empty result, because the spans of some tools lack it.
            is_error = piece.is_error or self.pieces[call.result].is_error
            self.pieces[call.result] = piece._replace(is_error=is_error)


def _key(result: Piece) -> tuple[str, ...]:
    """Return the key of the call that a result in a list of messages answers: its id, or else its name."""
    if result.call_id:
        return "id", result.call_id
    return ("name", result.name) if result.name else ("any",)
