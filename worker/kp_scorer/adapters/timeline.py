"""Joins the spans of a run: the inputs and outputs of each call of a model and of each tool, in one order.

The input of each call of a model repeats the entire conversation, and the result of a tool is both in its own span and in the
next input. So a piece counts where it occurs first. Some servers number the calls of each answer anew, so one id may stand for
several calls. A call without an id is identified by its name and arguments, which may recur too. A run is what happened since
the user spoke last: what the first input holds of earlier turns is no part of it.

All of this takes time in proportion to the size of the spans, whatever they hold.
"""

import operator
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from kp_scorer.adapters.blocks import Piece, call_input
from kp_scorer.adapters.building import Run, digests_of, moment
from kp_scorer.adapters.node import Node, as_json

_EMPTY: Final = ("", "{}", "null")
_SKEW_NS: Final = 1_000_000  # A tool may seem to begin this long before the model that called it: clocks are coarse.
_MADE_BY_A_PROGRAM: Final = re.compile(r"\s*(?:[{\[]|[A-Za-z_]\w*\(\w+=)")
_RECENT: Final = 8  # A prompt may repeat as many of the newest pieces in words of its own.

SpanKind = Literal["model", "tool", "event", "agent", "other"]

_KINDS: Final[dict[str, SpanKind]] = {  # By the names that conventions have for kinds of spans and for operations.
    **dict.fromkeys("generation llm chat chat_model generate_content text_completion completion".split(), "model"),  # noqa: SIM905
    **dict.fromkeys(("model", "model_generation", "model_step", "model_inference"), "model"),
    **dict.fromkeys(("tool", "tool_call", "mcp_tool_call", "retriever", "execute_tool", "function"), "tool"),
    **dict.fromkeys(("agent", "agent_run", "invoke_agent", "invoke_workflow", "workflow", "flow"), "agent"),
    "event": "event",
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


def kind_of(name: str) -> SpanKind:
    """Return the kind of a span by the name that its convention has for it."""
    return _KINDS.get(name.strip('"').lower(), "other")


def run_of(
    origin: Node,
    own_id: str,
    spans: Sequence[Span],
    started_us: int | None,
    record: dict[str, Any],
    framework: str | None = None,
) -> Run:
    """Make a run of spans, whose place is ``origin``. It did not succeed if its root failed, or what surrounds its last call.

    A call of a model around, within or beside another with the same answer is the same call recorded twice, and so is a call of
    a tool within one of that name. Spans of other kinds supply only what no call of a model shows: the question and the answer.
    The outermost span has the question in the user's words, which frameworks rephrase for the models.
    """
    repeated, failed = _repeated(spans)
    run = _Conversation()
    for _, _, number, is_end in sorted(_moments(spans, repeated)):
        run.add(number, spans[number], is_end=is_end, has_failed=number in failed)
    around = sorted((span for span in spans if span.kind in ("agent", "other")), key=lambda span: span.started_ns)
    calls = [span for span in spans if span.kind in ("model", "tool")]
    roots = [span for span in spans if span.span_id and not span.parent_id]
    first_call = min(calls, key=lambda span: span.started_ns, default=None)
    ancestors = [span for span in reversed(_ancestors(spans, first_call)) if span.kind in ("agent", "other")]
    outermost = [*(span for span in around if not span.span_id or [span] == roots), *ancestors]
    pieces = run.turn()
    if not any(piece.kind in ("agent", "call") for piece in pieces):
        # No span of a model has messages: the longest conversation around them is the run.
        longest = max((_conversation(span) for span in around), key=_count_calls, default=[])
        pieces = _last_turn(longest) if _count_calls(longest) else pieces
    asked = [piece for span in outermost for piece in _last_turn(span.inputs) if piece.kind == "user" and not _is_json(piece)]
    if asked:
        pieces = _with_question(pieces, asked[0])
    texts = ([piece for piece in span.outputs if piece.kind == "agent" and not _is_json(piece)] for span in outermost)
    answers = next(filter(None, texts), [])
    if answers and not _places(answers[-1], pieces) and not _is_summary(answers[-1], pieces):
        pieces = [*pieces, answers[-1]]
    kinds = {piece.kind for piece in pieces}
    questions = [
        piece for span in around for piece in _last_turn(_conversation(span)) if piece.kind == "user" and "user" not in kinds
    ]
    answers = [piece for span in reversed(around) for piece in span.outputs if piece.kind == "agent" and "agent" not in kinds]
    pieces = [*[piece for piece in questions if not _is_json(piece)][:1], *pieces, *sorted(answers, key=_is_json)[:1]]
    created_at = None if started_us is None else moment(origin, started_us)
    is_part = len(roots) == 1 and roots[0].kind == "model"
    return Run(origin, own_id, pieces, created_at, _success(spans), framework, record=record, is_part=is_part)


def _moments(spans: Sequence[Span], repeated: set[int]) -> Iterator[tuple[int, int, int, bool]]:
    """Yield when each span begins and ends, as keys of one order. At equal times, the span that began first is first.

    The answer of a model is there before the first of its tools begins, even if the span of the model surrounds that.
    """
    began: defaultdict[tuple[str, str], deque[tuple[int, int]]] = defaultdict(deque)  # By id and by name: time and number.
    for time_ns, number in sorted((span.started_ns, number) for number, span in enumerate(spans) if span.kind == "tool"):
        for piece in spans[number].inputs:
            began["id", piece.call_id].append((time_ns, number))
            began["name", piece.name].append((time_ns, number))
    called: set[int] = set()
    ordered = sorted(enumerate(spans), key=lambda each: each[1].started_ns)
    for number, span in ordered:
        if span.kind in ("agent", "other") or number in repeated:
            continue
        start_ns, end_ns = span.started_ns, max(span.started_ns, span.ended_ns or 0)
        for piece in span.outputs if span.kind == "model" else ():
            # Frameworks may give the calls that they carry out ids of their own.
            for key in [("id", piece.call_id)] * bool(piece.call_id) + [("name", piece.name)]:
                tools = began[key] if key in began and piece.kind == "call" else deque()
                while tools and (tools[0][1] in called or tools[0][0] < start_ns - _SKEW_NS):
                    tools.popleft()
                if tools:
                    called.add(tools[0][1])
                    end_ns = min(end_ns, tools.popleft()[0] - 1)
                    break
        yield min(start_ns, end_ns), span.started_ns, number, False
        yield end_ns, span.started_ns, number, True


def _ancestors(spans: Sequence[Span], inner: Span | None) -> list[Span]:
    """Return the spans around one, the innermost first."""
    by_id = {span.span_id: span for span in spans if span.span_id}
    ancestors: list[Span] = []
    while inner and (inner := by_id.pop(inner.parent_id, None)):
        ancestors.append(inner)
    return ancestors


def _success(spans: Sequence[Span]) -> bool | None:
    """Return False if the only root failed, or a span around the last call of a model or a tool; otherwise None."""
    roots = [span for span in spans if span.span_id and not span.parent_id]
    calls = [span for span in spans if span.kind in ("model", "tool")]
    around = _ancestors(spans, max(calls, key=lambda span: (span.ended_ns or 0, -span.started_ns), default=None))
    surrounding = [*(roots if len(roots) == 1 else ()), *(span for span in around if span.kind in ("agent", "other"))]
    return False if any(span.has_failed for span in surrounding) else None


def _last_turn(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces from the last message of the user on, with those of the user just before it."""
    start = max((place for place, piece in enumerate(pieces) if piece.kind == "user"), default=0)
    while start and pieces[start - 1].kind == "user":
        start -= 1
    return list(pieces[start:])


def _conversation(span: Span) -> list[Piece]:
    """Return the conversation in a span: its output alone, if that repeats the input."""
    return [*(() if any(piece.kind == "user" for piece in span.outputs) else span.inputs), *span.outputs]


def _count_calls(pieces: Sequence[Piece]) -> int:
    return sum(piece.kind == "call" for piece in pieces)


def _is_summary(answer: Piece, pieces: Sequence[Piece]) -> bool:
    """Return whether an answer is the texts of a run joined."""
    last = next((piece for piece in reversed(pieces) if piece.kind == "agent"), None)
    return last is not None and _spaced(last) in _spaced(answer)


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
    """Return whether a text is JSON, or the ``repr`` of an object."""
    return _MADE_BY_A_PROGRAM.match(piece.text) is not None


def _repeated(spans: Sequence[Span]) -> tuple[set[int], set[int]]:
    """Return the numbers of the spans that record the call of another one, and of those whose inner record failed."""
    numbers = {span.span_id: number for number, span in enumerate(spans) if span.span_id}
    within: defaultdict[int | None, list[int]] = defaultdict(list)
    for number, span in enumerate(spans):
        within[numbers.get(span.parent_id)].append(number)
    repeated, failed = _beside(spans), set[int]()
    around: defaultdict[str, list[int]] = defaultdict(list)  # The tools around a span, by their names.
    models: defaultdict[int | None, list[int]] = defaultdict(list)  # The first two calls directly within each span.
    # This is no recursion, as spans may be nested more deeply than the stack allows.
    waiting = [(number, True) for number in within[None]]
    while waiting:
        number, is_entered = waiting.pop()
        span = spans[number]
        if is_entered:
            if span.kind == "tool":
                if outer_tools := around[span.name]:
                    repeated.add(number)
                    failed.update(outer_tools[:1] if span.has_failed else ())
                outer_tools.append(number)
            waiting += [(number, False), *((inner, True) for inner in within[number])]
            continue
        if span.kind == "tool":
            around[span.name].pop()
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
    return repeated, failed


def _beside(spans: Sequence[Span]) -> set[int]:
    """Return the numbers of the calls of models that began during another one with the same question and answer."""
    repeated: set[int] = set()
    ends_ns: dict[bytes, int] = {}
    models = (number for number, span in enumerate(spans) if span.kind == "model" and span.outputs)
    for number in sorted(models, key=lambda number: spans[number].started_ns):
        span = spans[number]
        *_, digest = digests_of([*(piece._replace(name="") for piece in span.inputs[-1:]), *span.outputs])
        if span.started_ns < ends_ns.get(digest, 0):
            repeated.add(number)
        ends_ns[digest] = max(span.ended_ns or 0, ends_ns.get(digest, 0))
    return repeated


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


class _Conversation:
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
                    self.context = slice(before, len(self.pieces) - len(_last_turn(self.pieces[before:])))
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
                # Frameworks may give the calls that they carry out ids of their own.
                or self._waiting.first("words", self._words(piece))
                or self._running(piece, span)
            )
        else:
            call = self._waiting.first("words", self._words(piece)) or self._waiting.first("name", piece.name)
            call = call or self._running(piece, span)
        if not call:
            # No model has called it yet, or the tool is retried.
            call = self._new(piece)
            call.by_tool_alone, call.started_ns = True, span.started_ns
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
