"""Recognises the calls of a run where they recur, by their ids, or else by their names and arguments.

Some servers number the calls of each answer anew, so one id may stand for several calls. A call without an id is identified by
its name and arguments, which may recur, too.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kp_scorer.adapters.node import as_json
from kp_scorer.adapters.pieces import Piece, call_input
from kp_scorer.adapters.span import Span


@dataclass(eq=False, slots=True)
class Call:
    """A call of a tool in a conversation."""

    place: int  # Its position among the pieces.
    name: str
    call_id: str
    by_tool_alone: bool = False  # True if only the span of a tool has the call, and no model's.
    started_ns: int = 0  # The time at which the tool began, if no model had called it yet.
    has_begun: bool = False
    ended_ns: int = 0
    result: int | None = None  # The position of its result among the pieces.


class Queues:
    """Queues of open calls, one for each key; a call may be in several."""

    def __init__(self, is_open: Callable[[Call], bool]) -> None:
        """Hold calls as long as ``is_open`` is true for them. Once it is false for a call, it must stay false."""
        self._is_open = is_open
        self._by_key: defaultdict[tuple[str, ...], deque[Call]] = defaultdict(deque)

    def add(self, call: Call, *keys: tuple[str, ...]) -> None:
        """Hold a call under these keys."""
        for key in keys:
            self._by_key[key].append(call)

    def first(self, *key: str) -> Call | None:
        """Return the first call under a key that is still open; None if there is none."""
        calls = self._by_key[key]
        while calls and not self._is_open(calls[0]):
            calls.popleft()
        return calls[0] if calls else None


class Calls:
    """The calls in a conversation so far, with queues of those that are still open."""

    def __init__(self) -> None:
        self.unanswered = Queues(lambda call: call.result is None)
        self.waiting = Queues(lambda call: not call.has_begun and call.result is None)
        self.of_tools = Queues(lambda call: call.by_tool_alone)
        self.has_several = False  # True if an id stands for several calls. Only the whole list of messages tells them apart.
        self._by_key: defaultdict[tuple[str, ...], list[Call]] = defaultdict(list)  # Calls by id, by words, and by both.
        # Each piece with its words, by Python's ``id`` of the piece. Holding the piece keeps Python from reusing the ``id``.
        self._texts: dict[int, tuple[Piece, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def has(self, call_id: str) -> bool:
        """Return whether there is a call of this id."""
        return bool(self._by_key.get((call_id,)))

    def identity_of(self, call: Piece) -> str:
        """Return the text that identifies a call: its id, or else its name and arguments."""
        return call.call_id or self._words(call)

    def _words(self, call: Piece) -> str:
        """Return the words of a call, which are its name and arguments as a text. They are made once for each piece."""
        if id(call) not in self._texts:
            self._texts[id(call)] = call, f"{call.name}({as_json(call_input(call))})"
        return self._texts[id(call)][1]

    def add(self, call: Call, piece: Piece) -> None:
        """Index a call by the id, the name and the words of the piece that shows it."""
        identity, words = self.identity_of(piece), self._words(piece)
        self.add_words(call, piece)
        if piece.call_id:
            self._by_key[identity,].append(call)
        self.has_several = self.has_several or len(self._by_key[identity,]) > 1
        self._by_key[identity, words].append(call)
        for queues in (self.unanswered, self.waiting, self.of_tools):
            queues.add(call, ("id", piece.call_id), ("id", piece.call_id, piece.name), ("any",))
            queues.add(call, ("name", piece.name), ("name", piece.name, piece.call_id), ("words", words))

    def add_words(self, call: Call, piece: Piece) -> None:
        """Also index a call by the words of another piece that shows it."""
        if call not in self._by_key[self._words(piece),][-1:]:
            self._by_key[self._words(piece),].append(call)

    def matches(self, calls: Sequence[Piece]) -> list[Call | None]:
        """Return for each call in a list of messages the same call of the conversation, or None.

        A list may lack its beginning, so its calls are compared with the newest ones. Two calls with one id and name are the
        same even if their arguments differ, as exporters rephrase those, unless the id occurs more often than before.
        """
        ids = Counter(map(self.identity_of, calls))
        keys = Counter((self.identity_of(call), self._words(call)) for call in calls)
        words = Counter(map(self._words, calls))
        # Gemini gives calls ids in an answer, but not in the conversation that repeats the answer.
        last = {identity: iter(self._by_key[identity,][-count:]) for identity, count in ids.items()}
        alike = {key: iter(self._by_key[key][-count:]) for key, count in keys.items()}
        rephrased = {text: iter(self._by_key[text,][-count:]) for text, count in words.items()}
        matches = []
        for call in calls:
            identity = self.identity_of(call)
            at_its_place = next(last[identity], None)
            if at_its_place:
                # A tool that is retried has more calls than the model made. This call is one that the model made.
                at_its_place.by_tool_alone = False
            same = next(alike[identity, self._words(call)], None)
            # The list of messages may have ids of its own, or be the only place that has ids.
            renumbered = next(rephrased[self._words(call)], None)
            renumbered = renumbered if renumbered and renumbered.call_id not in ids else None
            at_its_place = at_its_place if at_its_place and at_its_place.name == call.name else None
            matches.append(same or at_its_place or renumbered)
        return matches

    def still_open(self, piece: Piece) -> Call | None:
        """Return the call that a call in an answer repeats, by its id: its tool has begun already, or it has no result yet."""
        if not piece.call_id:
            return None
        started = [call for call in self._by_key[piece.call_id,][-1:] if call.by_tool_alone and call.name == piece.name]
        alike = [call for call in self._by_key[piece.call_id, self._words(piece)][-1:] if call.result is None]
        return next(iter(started + alike), None)

    def begun_within(self, span: Span, piece: Piece) -> Call | None:
        """Return the call that a call in an answer repeats, by its words or its name: its tool began within the model's span.

        A name alone identifies a call only if one of the two has no id.
        """
        for key in (("words", self._words(piece)), ("name", piece.name)):
            call = self.of_tools.first(*key)
            has_ids = piece.call_id and call and call.call_id
            if call and call.started_ns >= span.started_ns and (key[0] == "words" or not has_ids):
                self.add(call, piece)
                return call
        return None

    def carried_out_by(self, piece: Piece, span: Span) -> Call | None:
        """Return the call that a tool carries out: by its id, or else by its name and arguments, or else by its name."""
        if not piece.call_id:
            call = self.waiting.first("words", self._words(piece)) or self.waiting.first("name", piece.name)
            return call or self._running(piece, span)
        return (
            self.waiting.first("id", piece.call_id, piece.name)
            or self.unanswered.first("id", piece.call_id, piece.name)
            or self.waiting.first("id", piece.call_id)
            or self.waiting.first("name", piece.name, "")
            # A framework may give its own ids to the calls that it carries out, and leave out the arguments.
            or self.waiting.first(*(("name", piece.name) if piece.arguments is None else ("words", self._words(piece))))
            or self._running(piece, span)
        )

    def _running(self, piece: Piece, span: Span) -> Call | None:
        """Return the call with the same words that another span is still carrying out, unless both have ids."""
        calls = self._by_key[self._words(piece),][-1:]
        return next((call for call in calls if call.ended_ns > span.started_ns and not (call.call_id and piece.call_id)), None)
