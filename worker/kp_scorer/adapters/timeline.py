"""Joins the spans of a run: puts the inputs and outputs of its models and tools into one order.

A call that several spans record is one call. A run is everything that happened since the user spoke last: earlier turns, which
the first input repeats, are not part of it.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.attributes import attributes_of
from kp_scorer.adapters.building import Run, digests_of, ends_run, trace_id
from kp_scorer.adapters.conversation import Conversation, last_turn
from kp_scorer.adapters.instrumentations import framework_of, remedy_for
from kp_scorer.adapters.node import as_json
from kp_scorer.adapters.pieces import Piece, has_kind
from kp_scorer.adapters.span import Span, Spans
from kp_scorer.adapters.times import moment
from kp_scorer.errors import NotRecorded, Problem

_SKEW_NS: Final = 1_000_000  # A tool may seem to begin this long before the model that called it: clocks are coarse.
_INTERRUPT: Final = "GraphInterrupt"  # LangGraph raises it in a node that waits for a person.
_THREAD: Final = "thread_id"
_STATES: Final = ("events", "status")
"""The fields of a span that hold the errors raised in it."""
_MADE_BY_A_PROGRAM: Final = re.compile(r"\s*\"?(?:[{\[]|[A-Za-z_]\w*\(\w+=)")


def run_of(kind: str, own_id: str, read: Spans, record: dict[str, Any] | None = None) -> Run | list[Run]:
    """Make a run of the spans with one trace id; return an empty list if none of them is an agent's.

    The run failed if its root did, or a span around its last call. The caller's paths lead into ``record``, by default the
    root. Raises NotRecorded if the spans of agents hold no messages, and NotConverted if none of their messages can be read.
    """
    spans = sorted(read.all, key=lambda span: span.started_ns)
    if not any(piece.kind in ("user", "agent") for span in spans for piece in (*span.inputs, *span.outputs)):
        if read.unreadable:
            raise read.unreadable[0]
        agents = sorted((span for span in read.all if span.kind in ("model", "agent")), key=lambda span: span.kind != "model")
        if not agents:
            return []
        silent = agents[0].node
        raise NotRecorded(silent.line, [Problem(silent.path, remedy_for(silent))])
    roots = [span for span in spans if span.span_id and not span.parent_id]
    if record is None:
        described = (roots or spans)[0].node
        resource = described.at("resource")
        record = described.object() | {"attributes": attributes_of(described).value}
        record |= {} if resource.value is None else {"resource": attributes_of(resource).value}
    started_us = next((span.started_ns // 1_000 for span in spans if span.started_ns), None)
    # Leave out interrupts, which some recorders show as errors of tools.
    pieces = [each for each in _pieces_of(read.all, roots) if each.kind != "result" or not each.text.startswith(_INTERRUPT)]
    return Run(
        spans[0].node,
        trace_id(kind, own_id, [span.node.value for span in spans]),
        pieces,
        created_at=None if started_us is None else moment(spans[0].node, started_us),
        success=False if any(span.has_failed for span in _around_the_last_call(spans, roots)) else None,
        framework=framework_of(spans),
        record=record,
        is_part=(len(roots) == 1 and roots[0].kind == "model") or _is_interrupted(spans, pieces),
    )


def _is_interrupted(spans: Sequence[Span], pieces: Sequence[Piece]) -> bool:
    """Return whether a graph of LangGraph waits for a person: a node raises an interrupt, or a thread ends with a call."""
    if any(_INTERRUPT in as_json([span.node.value.get(key) for key in _STATES]) for span in spans):
        return True
    waits = bool(pieces) and pieces[-1].kind == "call" and not ends_run(pieces[-1])
    return waits and any(_THREAD in as_json(span.node.value) for span in spans)


def _resumed_tools(spans: Sequence[Span]) -> set[int]:
    """Return the numbers of the tools that resume an interrupted run: the input of its first model has them already."""
    models = (span for span in spans if span.kind == "model" and span.inputs)
    if (first := min(models, key=lambda span: span.started_ns, default=None)) is None:
        return set()
    called = {piece.name for piece in last_turn(first.inputs) if piece.kind == "call"}
    ended = ((number, span) for number, span in enumerate(spans) if (span.ended_ns or span.started_ns) <= first.started_ns)
    return {number for number, span in ended if span.kind == "tool" and span.name in called}


def _pieces_of(spans: Sequence[Span], roots: Sequence[Span]) -> list[Piece]:
    """Return the pieces of a run in their order.

    If a call of a model lies around, within or beside another one with the same answer, both are records of one call, and so
    are a call of a tool and another of the same name within it. Spans of other kinds supply only the question and the answer,
    where no call of a model shows them. The outermost span has the question in the user's words, which frameworks rephrase for
    the models.
    """
    repeated, failed = _repeated(spans)
    repeated |= _resumed_tools(spans)
    run = Conversation()
    for _, _, number, is_end in sorted(_moments(spans, repeated)):
        run.add(number, spans[number], is_end=is_end, has_failed=number in failed)
    pieces = run.turn()
    around = sorted((span for span in spans if span.kind in ("agent", "other")), key=lambda span: span.started_ns)
    if not has_kind(pieces, "agent", "call"):
        # No span of a model has messages: the longest conversation around them is the run.
        longest = max((_conversation(span) for span in around), key=_count_calls, default=[])
        pieces = last_turn(longest) if _count_calls(longest) else pieces
    calls = [span for span in spans if span.kind in ("model", "tool")]
    ancestors = _ancestors(spans, min(calls, key=lambda span: span.started_ns, default=None))
    outermost = [*(span for span in around if not span.span_id or [span] == roots), *reversed(ancestors)]
    asked = [piece for span in outermost for piece in last_turn(span.inputs) if piece.kind == "user" and not _is_json(piece)]
    if asked:
        pieces = _with_question(pieces, asked[0])
    texts = ([piece for piece in span.outputs if piece.kind == "agent" and not _is_json(piece)] for span in outermost)
    answers = next(filter(None, texts), [])
    # An answer that contains the last text of the run is a summary, which joins all texts.
    last = [piece for piece in pieces if piece.kind == "agent"][-1:]
    if answers and not _places(answers[-1], pieces) and not any(_places(each, answers[-1:]) for each in last):
        pieces = [*pieces, answers[-1]]
    kinds = {piece.kind for piece in pieces}
    if "user" not in kinds:
        questions = (piece for span in around for piece in last_turn(_conversation(span)) if piece.kind == "user")
        pieces = [*[piece for piece in questions if not _is_json(piece)][:1], *pieces]
    if "agent" not in kinds:
        # An output that ends before the last call of the run begins is not the answer.
        last_ns = max((span.started_ns for span in calls), default=0)
        later = [span for span in reversed(around) if not span.parent_id or (span.ended_ns or last_ns) >= last_ns]
        answers = [piece for span in later for piece in span.outputs if piece.kind == "agent"]
        pieces = [*pieces, *sorted(answers, key=_is_json)[:1]]
    return pieces


def _moments(spans: Sequence[Span], repeated: set[int]) -> Iterator[tuple[int, int, int, bool]]:
    """Yield the beginning and the end of each span as tuples to sort: time, start of the span, its number, True at the end.

    The answer of a model ends before the first of its tools begins, even if the span of the model surrounds that tool's.
    """
    # The times and numbers of tools, by the ids and the names of their calls.
    began: defaultdict[tuple[str, str], deque[tuple[int, int]]] = defaultdict(deque)
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
        # An output with results is the conversation so far, not an answer.
        is_answer = span.kind == "model" and not has_kind(span.outputs, "user", "result")
        for piece in span.outputs if is_answer else ():
            # A framework may give its own ids to the calls that it carries out.
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
    """Return the spans of the kinds agent and other around a span, the innermost first."""
    by_id = {span.span_id: span for span in spans if span.span_id}
    ancestors: list[Span] = []
    while inner and (inner := by_id.pop(inner.parent_id, None)):
        ancestors += [inner] * (inner.kind in ("agent", "other"))
    return ancestors


def _around_the_last_call(spans: Sequence[Span], roots: Sequence[Span]) -> list[Span]:
    calls = [span for span in spans if span.kind in ("model", "tool")]
    last = max(calls, key=lambda span: (span.ended_ns or 0, -span.started_ns), default=None)
    return [*(roots if len(roots) == 1 else ()), *_ancestors(spans, last)]


def _conversation(span: Span) -> list[Piece]:
    """Return the conversation in a span: only its output if that repeats the input."""
    return [*(() if has_kind(span.outputs, "user") else span.inputs), *span.outputs]


def _count_calls(pieces: Sequence[Piece]) -> int:
    return sum(piece.kind == "call" for piece in pieces)


def _with_question(pieces: list[Piece], asked: Piece) -> list[Piece]:
    """Return the pieces of a run with the question first, in place of the message that contains it."""
    if not (places := _places(asked, pieces)):
        return [asked, *pieces]
    place = places[0]
    # Messages of the user before that, and before any act of the agent, are instructions.
    is_first = all(piece.kind == "user" for piece in pieces[:place])
    return [asked, *([] if is_first else pieces[:place]), *pieces[place + 1 :]]


def _places(part: Piece, pieces: Sequence[Piece]) -> list[int]:
    """Return the places of the pieces of the same kind whose texts contain the text of ``part``, apart from white space."""
    text = _spaced(part)
    return [place for place, piece in enumerate(pieces) if piece.kind == part.kind and text in _spaced(piece)]


def _spaced(piece: Piece) -> str:
    return " ".join(piece.text.split())


def _is_json(piece: Piece) -> bool:
    """Return whether a text is JSON, or the ``repr`` of an object."""
    return _MADE_BY_A_PROGRAM.match(piece.text) is not None


def _repeated(spans: Sequence[Span]) -> tuple[set[int], set[int]]:
    """Return the numbers of the spans that repeat the call of another span, and of the tools whose inner record failed."""
    numbers = {span.span_id: number for number, span in enumerate(spans) if span.span_id}
    within: defaultdict[int | None, list[int]] = defaultdict(list)
    for number, span in enumerate(spans):
        within[numbers.get(span.parent_id)].append(number)
    repeated, failed = _beside(spans), set[int]()
    around: defaultdict[str, list[int]] = defaultdict(list)  # The tools around a span, by their names.
    models: defaultdict[int | None, list[int]] = defaultdict(list)  # The first two calls of models directly within each span.
    # This is not recursive, because spans may be nested more deeply than the stack allows.
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
            # If one call is nested in another, the larger one counts. A span around several calls is not a call itself.
            sizes = [len(spans[each].inputs) + len(spans[each].outputs) for each in (number, *inside)]
            is_outer = len(inside) < 2 and sizes[0] >= max(sizes)
            repeated.update(inside if is_outer else [number])
            inside = [number] if is_outer else inside
        if span.kind != "tool":
            outer = numbers.get(span.parent_id)
            models[outer] = [*models[outer], *inside][:2]
    return repeated, failed


def _beside(spans: Sequence[Span]) -> set[int]:
    """Return the numbers of the calls of models that began during another call with the same question and answer."""
    repeated: set[int] = set()
    ends_ns: dict[bytes, int] = {}
    models = (number for number, span in enumerate(spans) if span.kind == "model" and span.outputs)
    for number in sorted(models, key=lambda number: spans[number].started_ns):
        span = spans[number]
        *_, digest = digests_of([*span.inputs[-1:], *span.outputs])
        if span.started_ns < ends_ns.get(digest, 0):
            repeated.add(number)
        ends_ns[digest] = max(span.ended_ns or 0, ends_ns.get(digest, 0))
    return repeated
