"""Decisions to look at together: those of a file, those that a file's traces get, or those that the ledger holds."""

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import IO, Any, Final, NamedTuple

import click
from pydantic import ValidationError

from kp_scorer.cli.input import Line, open_input, read_bytes, read_traces, unpacked
from kp_scorer.cli.options import Command, ledger_options
from kp_scorer.cli.output import progress, refused, say
from kp_scorer.cli.scoring import score_lines
from kp_scorer.decision import Decision
from kp_scorer.errors import InvalidTrace
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.endpoints import with_endpoints
from kp_scorer.trace import ReasoningTrace

_SHOWN_EVERY: Final = 1_000
_MOST_BYTES: Final = 2**20
"""Of a line with a decision, which takes some two kilobytes."""


class Gathered(NamedTuple):
    """Decisions, and what is known beside them."""

    decisions: list[Decision]
    """Of a file in its order; of the ledger in that in which they were placed in the novelty log, or decided."""
    traces: Mapping[str, ReasoningTrace]
    """The traces that were decided, by id; empty unless a file of traces was read."""
    letters: Mapping[str, int]
    """How many dead letters there are of each reason; empty unless the ledger was read."""
    refused: int
    """How many lines held neither."""
    source: str
    """Where they are from, for display."""


def gathering_options(command: Command) -> Command:
    """Let a command be told where its decisions are, and pass it what was ``gathered`` and the ``settings``."""

    @click.argument("file", metavar="[FILE|-]", type=click.Path(allow_dash=True), required=False)
    @click.option("--stored", is_flag=True, help="Take the decisions that the ledger holds, in place of a file.")
    @ledger_options("With --stored")
    @wraps(command)
    def with_decisions(*args: Any, file: str | None, stored: bool, settings: Settings, **kwargs: Any) -> None:
        if stored == (file is not None):
            raise click.UsageError("expected either FILE, of traces or of decisions, or --stored")
        gathered = _stored(with_endpoints(settings)) if file is None else gather_file(file, settings)
        command(*args, gathered=gathered, settings=settings, **kwargs)

    return with_decisions


def _stored(settings: Settings) -> Gathered:
    decisions: list[Decision] = []
    with Store.open(settings) as store, progress("read") as advance:
        total = store.ledger.counts().decided
        for found in store.ledger.all_decided():
            decisions.append(found.decision)
            if len(decisions) % _SHOWN_EVERY == 0:
                advance(len(decisions), max(total, len(decisions)), is_estimate=True)
        letters = Counter(letter.reason for letter in store.dead_letters.read())
    return Gathered(sorted(decisions, key=_turn), {}, letters, 0, "the ledger")


def _turn(decision: Decision) -> tuple[float, int]:
    """What orders decisions as their traces came: the place in the log, or the time of a decision without one; in ms."""
    time_ms, _, number = (decision.novelty.entry or "").partition("-")
    return (int(time_ms), int(number)) if number else (datetime.fromisoformat(decision.decided_at).timestamp() * 1_000, 0)


def gather_file(name: str, settings: Settings) -> Gathered:
    """Gather the decisions that a file holds, or those that its traces get; ``-`` is standard input.

    Raises:
        BadParameter: it cannot be opened or read, or is in another format.
        SettingsError: an embedder is required and cannot be loaded.
    """
    with open_input(name) as opened:
        stream = unpacked(opened)
        if _holds_decisions(stream):
            decisions, bad = _read_decisions(stream)
            return Gathered(decisions, {}, {}, bad, name)
        return _score(stream, name, settings)


def _score(stream: IO[bytes], name: str, settings: Settings) -> Gathered:
    decisions: list[Decision] = []
    traces: dict[str, ReasoningTrace] = {}
    bad = 0
    total: int | None = None

    def batches() -> Iterator[list[Line]]:
        nonlocal total
        lines = read_traces(stream, settings.limits)
        while batch := list(islice(lines, settings.worker.batch_size)):
            total = batch[-1].of
            yield batch

    for line, found in score_lines(batches(), lambda: (total, False), settings):
        if isinstance(found, Decision) and not isinstance(line.trace, InvalidTrace):
            if found.trace_id not in traces:
                decisions.append(found)
            traces[found.trace_id] = line.trace
        elif not isinstance(found, Decision):
            bad += 1
            refused(line, found)
    return Gathered(decisions, traces, {}, bad, name)


def _holds_decisions(stream: io.BufferedReader) -> bool:
    """Whether the first line is one that `score`, `decisions` or `status` prints, and no trace."""
    beginning = read_bytes(stream.peek, 1).lstrip().partition(b"\n")[0]
    return b'"trace_id"' in beginning and b'"@type"' not in beginning


def _read_decisions(stream: IO[bytes]) -> tuple[list[Decision], int]:
    """Read decisions, each once, and those within what `submit --wait` and `status` print; count the lines without one."""
    decisions: dict[str, Decision] = {}
    bad = 0
    lines = iter(lambda: read_bytes(stream.readline, _MOST_BYTES), b"")
    for number, raw in enumerate(lines, 1):
        if not (line := raw.strip()):
            continue
        try:
            row = json.loads(line)
            decision = Decision.model_validate(row.get("decision", row))
        except (ValueError, AttributeError, RecursionError) as error:
            bad += 1
            say(f"line {number}: {_what_is_wrong(error)}")
        else:
            # Of a trace that was forgotten and came again, the ledger has the later one.
            known = decisions.get(decision.trace_id, decision)
            decisions[decision.trace_id] = max(known, decision, key=lambda each: each.decided_at)
    return list(decisions.values()), bad


def _what_is_wrong(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "expected a decision, as one JSON object"
    first = error.errors(include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or '$'}: {first['msg']}, in place of a decision"
