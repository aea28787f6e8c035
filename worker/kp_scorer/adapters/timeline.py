"""Joins the spans of a run: the inputs and outputs of each call of a model and of each tool, in one order.

The input of each call of a model repeats the entire conversation, and the result of a tool is both in its own span and in the
next input. So a piece counts where it occurs first. Some servers number the calls of each answer anew, so one id may stand for
several calls. A call without an id is identified by its name and arguments, which may recur too.

All of this takes time in proportion to the size of the spans, whatever they hold.
"""

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from kp_scorer.adapters.building import Run, moment
from kp_scorer.adapters.messages import Piece, call_input
from kp_scorer.adapters.node import Node, as_json

_EMPTY = ("", "{}", "null")

SpanKind = Literal["model", "tool", "event", "other"]

KINDS: Final[dict[str, SpanKind]] = {  # By Langfuse's types of observations, OpenInference's kinds and GenAI's operations.
    **dict.fromkeys(("GENERATION", "LLM", "chat", "generate_content", "text_completion"), "model"),
    **dict.fromkeys(("TOOL", "RETRIEVER", "execute_tool"), "tool"),
    "EVENT": "event",
}


class Span(NamedTuple):
    """One span, or observation, of a run. Times are nanoseconds since 1970."""

    node: Node
    span_id: str
    parent_id: str
    started_ns: int
    ended_ns: int | None
    kind: SpanKind
    name: str  # The tool's name; empty for other spans.
    inputs: Sequence[Piece]  # The call of a tool; the conversation so far of a model; the input of another span.
    outputs: Sequence[Piece]  # The result of a tool; the answer of a model; the output of another span.
    has_failed: bool = False


def run_of(origin: Node, own_id: str, spans: Sequence[Span], started_us: int | None, record: dict[str, Any]) -> Run:
    """Make a run of spans, whose place is ``origin``. It did not succeed if its only root failed.

    A call of a model around or within another is the same call recorded twice, and so is a call of a tool within one of that
    name. Spans of other kinds supply only what no call of a model shows: the question and the answer. The outermost span has
    the question in the user's words, which frameworks rephrase for the models.
    """
    repeated = _repeated(spans)
    moments = [
        # At equal times, the span that began first is first.
        (time_ns, span.started_ns, number, is_end)
        for number, span in enumerate(spans)
        if span.kind != "other" and number not in repeated
        for is_end, time_ns in ((False, span.started_ns), (True, max(span.started_ns, span.ended_ns or 0)))
    ]
    run = _Conversation()
    for _, _, number, is_end in sorted(moments):
        run.add(number, spans[number], is_end=is_end)
    around = sorted((span for span in spans if span.kind == "other"), key=lambda span: span.started_ns)
    roots = [span for span in spans if span.span_id and not span.parent_id]
    success = False if len(roots) == 1 and roots[0].has_failed else None
    outermost = [span for span in around if not span.span_id or [span] == roots]
    pieces = run.pieces
    asked = [piece for span in outermost for piece in span.inputs if piece.kind == "user" and not _is_json(piece)]
    if asked:
        pieces = _with_question(pieces, asked[0])
    answers = [piece for span in outermost for piece in span.outputs if piece.kind == "agent" and not _is_json(piece)]
    if answers and not _places(answers[-1], pieces):
        pieces = [*pieces, answers[-1]]
    kinds = {piece.kind for piece in pieces}
    questions = [piece for span in around for piece in span.inputs if piece.kind == "user" and "user" not in kinds]
    answers = [piece for span in around for piece in span.outputs if piece.kind == "agent" and "agent" not in kinds]
    pieces = [*sorted(questions, key=_is_json)[:1], *pieces, *sorted(answers, key=_is_json)[:1]]
    created_at = None if started_us is None else moment(origin, started_us)
    return Run(origin, own_id, pieces, created_at, success, record=record)


def _with_question(pieces: list[Piece], asked: Piece) -> list[Piece]:
    """Return the pieces of a run with the question first, in place of the message that contains it."""
    if not (places := _places(asked, pieces)):
        return [asked, *pieces]
    place = places[0]
    # Earlier messages of the user, before the agent did anything, are instructions.
    is_first = all(piece.kind == "user" for piece in pieces[:place])
    return [asked, *([] if is_first else pieces[:place]), *pieces[place + 1 :]]


def _places(part: Piece, pieces: Sequence[Piece]) -> list[int]:
    """Return the places of the pieces of its kind whose texts contain that of ``part``, apart from white space."""
    text = _spaced(part)
    return [place for place, piece in enumerate(pieces) if piece.kind == part.kind and text in _spaced(piece)]


def _spaced(piece: Piece) -> str:
    return " ".join(piece.text.split())


def _is_json(piece: Piece) -> bool:
    return piece.text.lstrip().startswith(("{", "["))


def _repeated(spans: Sequence[Span]) -> set[int]:
    """Return the numbers of the spans that record the call of another span around or within them."""
    numbers = {span.span_id: number for number, span in enumerate(spans) if span.span_id}
    within: defaultdict[int | None, list[int]] = defaultdict(list)
    for number, span in enumerate(spans):
        within[numbers.get(span.parent_id)].append(number)
    repeated: set[int] = set()
    around: Counter[str] = Counter()
    models: defaultdict[int | None, list[int]] = defaultdict(list)  # The first two calls directly within each span.
    # This is no recursion, as spans may be nested more deeply than the stack allows.
    waiting = [(number, True) for number in within[None]]
    while waiting:
        number, is_entered = waiting.pop()
        span = spans[number]
        is_tool = span.kind == "tool"
        if is_entered:
            if is_tool and around[span.name]:
                repeated.add(number)
            around[span.name] += is_tool
            waiting += [(number, False), *((inner, True) for inner in within[number])]
            continue
        around[span.name] -= is_tool
        inside = models.pop(number, [])
        if span.kind == "model" and (span.inputs or span.outputs):
            # Of two nested calls the larger one counts. A span around several calls is no call itself.
            sizes = [len(spans[each].inputs) + len(spans[each].outputs) for each in (number, *inside)]
            is_outer = len(inside) < 2 and sizes[0] >= max(sizes)
            repeated.update(inside if is_outer else [number])
            inside = [number] if is_outer else inside
        if span.kind != "tool":
            outer = numbers.get(span.parent_id)
            models[outer] = [*models[outer], *inside][:2]
    return repeated


@dataclass(eq=False, slots=True)
class _Call:
    place: int  # Its position among the pieces.
    name: str
    call_id: str
    by_tool_alone: bool = False  # True if only the span of a tool has the call, and no model's.
    started_ns: int = 0  # When the tool began, if no model had called it yet.
    has_begun: bool = False  # True if the tool has begun.
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


class _Conversation:
    """The pieces of a run so far, and which of its calls have begun or ended."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
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

    def add(self, number: int, span: Span, *, is_end: bool) -> None:
        match span.kind, is_end:
            case "event", True:
                self.pieces += span.outputs
            case "model", True:
                self._add_answer(span)
            case "model", False:
                self._add_history(span.inputs)
            case "tool", True:
                for piece in span.outputs:
                    self._add_result(self._of_span[number], piece)
            case "tool", False:
                (piece,) = span.inputs
                self._of_span[number] = self._begin_tool(piece, span)

    def _add_history(self, pieces: Sequence[Piece]) -> None:
        """Add the new pieces of a conversation. It repeats all earlier pieces, each as often as it occurred."""
        new, matches = self._new_in(pieces)
        history, matched = self._history, iter(matches)
        history.pieces = pieces
        history.calls.update(filter(None, matches))
        for piece in new:
            if piece.kind == "call":
                call = next(matched) or self._new(piece)
                history.ids.add(self._id(piece))
                history.open.add(call, ("id", piece.call_id), ("name", piece.name), ("any",))
            elif piece.kind == "result" and (call_before := history.open.first(*_key(piece))):
                history.answered.add(call_before)
                self._add_result(call_before, piece)
            elif piece.kind == "result" and self._calls.get((piece.call_id,)):
                # The call may be in the beginning that a list lacks. Otherwise it has a result already.
                cut_off = self._unanswered.first("id", piece.call_id)
                if cut_off and piece.call_id not in history.ids and cut_off not in history.calls:
                    self._add_result(cut_off, piece)
            else:
                text = piece.kind, piece.text.strip()
                history.texts[text] += 1
                if history.texts[text] > self._texts[text]:
                    self._add_text(piece)

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
        # Gemini numbers the calls of an answer, but not in the conversation that repeats it.
        last = {own: iter(self._calls[own,][-count:]) for own, count in ids.items()}
        alike = {key: iter(self._calls[key][-count:]) for key, count in keys.items()}
        matches = []
        for call in calls:
            own = self._id(call)
            at_its_place = next(last[own], None)
            if at_its_place:
                # A tool that is retried has more calls than the model made.
                at_its_place.by_tool_alone = False
            same = next(alike[own, self._words(call)], None)
            matches.append(same or (at_its_place if at_its_place and at_its_place.name == call.name else None))
        return matches

    def _add_answer(self, span: Span) -> None:
        """Add an answer of a model. All of it is new, except a call whose tool has begun, and a call that is still open."""
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
            if call and call.started_ns >= span.started_ns and not (piece.call_id and call.call_id):
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
            )
        else:
            call = self._waiting.first("words", self._words(piece)) or self._waiting.first("name", piece.name)
        if not call:
            # No model has called it yet, or the tool is retried.
            call = self._new(piece)
            call.by_tool_alone, call.started_ns = True, span.started_ns
        if span.ended_ns is not None:
            latency_ms = max(0, span.ended_ns - span.started_ns) / 1_000_000
            self.pieces[call.place] = self.pieces[call.place]._replace(latency_ms=latency_ms)
        call.has_begun = True
        return call

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
            queues.add(call, ("id", piece.call_id), ("id", piece.call_id, piece.name))
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
