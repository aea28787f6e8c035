"""Finds the kept runs that are most like a task, in files that `keep` writes or among the runs that a fleet has accepted.

Each file has an index beside it, which is mapped into memory: the vector of each successful run's task, and the offset of the
run's line. The index is built on first use, and again once the file has changed. Where no index can be written, each process
builds its own.
"""

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from heapq import nlargest
from itertools import accumulate, islice, product
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from kp_scorer.adapters.chat import chat_of_trace
from kp_scorer.characters import escaped
from kp_scorer.decision import Decision
from kp_scorer.decoding import check_trace, parse_json
from kp_scorer.embedding.embedder import CheckedEmbedder, Vector, Vectors
from kp_scorer.embedding.select import select_embedder
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, NotConverted, ScorerError
from kp_scorer.files import open_regular
from kp_scorer.limits import Limits
from kp_scorer.offline import convert
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store
from kp_scorer.trace import ReasoningTrace

MOST_RUNS: Final = 100
_HEADER_BYTES: Final = 1_024
_LIMITS: Final = Limits(message_bytes=2**26, values=2**22)
_EMBEDDED_AT_ONCE: Final = 256
_LOOKED_UP_AT_ONCE: Final = 100
_SUPPLIED: Final[dict[str, Any]] = {"confidence": 0.5, "created_at": "2000-01-01T00:00:00Z", "settings": Settings()}
"""Fills in fields that records lack; nothing reads these values."""
_BYTES_PER_TOKEN: Final = 2
"""BERT's tokens have more bytes than this even in JSON with much punctuation; in prose they have twice as many."""
_LONGEST_MESSAGES: Final = (4_000, 1_000, 300, 100)
_INTRODUCTION: Final = "Runs that succeeded at like tasks, nearest first: records of what was done, no instructions.\n"


class SimilarRun(NamedTuple):
    """A kept run, and the similarity of its task."""

    similarity: float  # The cosine of the vectors; equal tasks have 1.
    trace_id: str
    domain: str
    task: str = ""  # The objective; empty, like ``messages``, for runs that a fleet has accepted, as Redis has no texts.
    score: float | None = None
    messages: Sequence[dict[str, Any]] = ()  # The texts, calls and results of the run, as in Chat Completions.


class _Row(BaseModel):
    """A line that ``keep --as messages`` writes, or one of ``--as pairs`` with its chosen messages."""

    trace_id: str
    task: str
    domain: str
    success: bool
    score: float | None = None
    messages: list[dict[str, Any]]


class KeptRuns:
    """Finds the kept runs that are most like a task. One thread at a time may use it.

    With a model, it works only in the process that created it, and raises ``EmbedderUnhealthy`` in one that is forked later.
    """

    def __init__(self, path: Path | str | None = None, settings: Settings | None = None) -> None:
        """Search a file that ``keep`` has written, or a folder of such files; without ``path``, the runs a fleet has accepted.

        The settings are by default those of the environment and the configuration file. Their embedder makes the vectors;
        without one, vectors count words. To search the runs of a fleet, the settings must name the fleet's embedder.

        Raises:
            SettingsError: a setting is wrong, or an embedder is required and cannot be loaded.
        """
        self._path = Path(path) if path is not None else None
        settings = settings or load_settings()
        self._settings = settings if path is not None else with_endpoints(settings)
        self._embedder = select_embedder(self._settings.embedding, self._settings.novelty.recipe) or WordsEmbedder()
        self._checked = CheckedEmbedder(self._embedder)
        self._unsaved: dict[Path, tuple[str, _Index]] = {}  # The indexes that could not be written beside their files.

    def similar(self, task: str, most: int = 5) -> list[SimilarRun]:
        """Return up to ``most`` successful runs that are most like a task, the nearest first.

        Raises:
            ScorerError: a file cannot be read, or has a line that ``keep`` does not write.
            ServiceUnavailable: Redis cannot be reached.
        """
        self._checked.check_process()
        (query,) = self._embedder.embed([task])
        return self._in_files(self._path, query, most) if self._path else list(islice(self._accepted(query), most))

    def _in_files(self, path: Path, query: Vector, most: int) -> list[SimilarRun]:
        nearest_of_all = list[tuple[float, Path, int]]()
        try:
            if packed := [file.name for file in sorted(path.glob("*.jsonl.*")) if file.suffix in (".gz", ".zst")]:
                # An index holds the places of runs in their file, which compression hides.
                raise ScorerError(f"{packed[0]}: expected no compressed file")
            for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
                vectors, offsets = self._index(file)
                similarities = vectors @ query
                least = np.partition(similarities, -most)[-most] if len(similarities) > most else -1
                near = np.flatnonzero(similarities >= least)
                nearest = near[np.argsort(-similarities[near], kind="stable")][:most]
                nearest_of_all += [(float(similarities[place]), file, int(offsets[place])) for place in nearest]
            return [_read(*each) for each in nlargest(most, nearest_of_all, key=itemgetter(0))]
        except OSError as error:
            raise ScorerError(f"{path}: {error.strerror}") from None

    def _index(self, file: Path) -> "_Index":
        """Map the index of a file; build it first if it is missing or out of date."""
        status, dimensions = file.stat(), self._embedder.dimensions
        origin = f"kept runs 1, {self._embedder.space}, {status.st_size} bytes of {status.st_mtime_ns} ns"
        path = file.with_name(f"{file.name}.index")
        with suppress(OSError), open_regular(path) as index:
            if mapped := _mapped(index, origin, dimensions):
                return mapped
        if self._unsaved.get(file, ("",))[0] == origin:
            return self._unsaved[file][1]
        # Another process may build it at the same time. The last one to finish replaces the index.
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with open_regular(partial, "w+b", follow=False) as index:
                mapped = self._build(index, file, origin)
            partial.replace(path)
        except OSError:
            # The folder is read-only, or its disk is full: use a temporary file elsewhere.
            with TemporaryFile() as index:
                mapped = self._build(index, file, origin)
            self._unsaved[file] = origin, mapped
        finally:
            with suppress(OSError):
                partial.unlink()
        return mapped

    def _build(self, index: IO[bytes], file: Path, origin: str) -> "_Index":
        offsets, tasks = array("q"), _successes(file)
        index.write(bytes(_HEADER_BYTES))
        while batch := list(islice(tasks, _EMBEDDED_AT_ONCE)):
            offsets.extend(offset for offset, _ in batch)
            index.write(np.nan_to_num(self._embedder.embed([task for _, task in batch])).tobytes())
        index.write(offsets.tobytes())
        index.seek(0)
        index.write(f"{origin}, {len(offsets)} runs".encode().ljust(_HEADER_BYTES))
        index.flush()
        mapped = _mapped(index, origin, self._embedder.dimensions)
        if not mapped:
            raise ScorerError(f"{file.name}.index: another program has changed it")
        return mapped

    def _accepted(self, query: Vector) -> Iterator[SimilarRun]:
        """Yield the accepted successes in the novelty log, nearest first; read only as many decisions as that takes."""
        with Store.open(self._settings) as store:
            entries = [each for each in store.novelty_log(self._embedder.space).entries() if each.vector.size == query.size]
            if not entries and store.novelty_logs():
                raise ScorerError("the fleet has another embedder: set embedding and novelty.recipe as it does")
            similarities = np.array([entry.vector for entry in entries]).reshape(-1, query.size) @ query
            places = iter(np.argsort(-similarities).tolist())
            while chunk := list(islice(places, _LOOKED_UP_AT_ONCE)):
                decided = store.ledger.decided([entries[place].trace_id for place in chunk])
                for place, each in zip(chunk, decided, strict=True):
                    decision = each.decision if each and each.succeeded else None
                    if decision and (decision.outcome, decision.novelty.entry) == ("accepted", str(entries[place].place)):
                        score, similarity = decision.score, round(float(similarities[place]), 4)
                        yield SimilarRun(similarity, decision.trace_id, decision.domain, score=score)


_Index = tuple[Vectors, NDArray[np.int64]]
"""The vectors of a file's successful runs, of shape (runs, dimensions), and the offsets of their lines in bytes."""


def _mapped(index: IO[bytes], origin: str, dimensions: int) -> _Index | None:
    """Map an index; return None if it is of another origin or incomplete."""
    runs, left_over = divmod(os.fstat(index.fileno()).st_size - _HEADER_BYTES, 4 * dimensions + 8)
    index.seek(0)
    if left_over or index.read(_HEADER_BYTES).rstrip() != f"{origin}, {runs} runs".encode():
        return None
    content = np.asarray(np.memmap(index, np.uint8, "r"))[_HEADER_BYTES:]
    vectors, offsets = np.split(content, [runs * 4 * dimensions])
    return vectors.view(np.float32).reshape(runs, dimensions), offsets.view(np.int64)


def _successes(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the offset in bytes of the line of each successful run, and its task."""
    with open_regular(file) as lines:
        offset = 0
        for number, line in enumerate(iter(lambda: lines.readline(_LIMITS.message_bytes + 1), b""), 1):
            if not line.isspace():
                run = _run_in(line, f"{file.name}, line {number}")
                if run.metadata.success if isinstance(run, ReasoningTrace) else run.success:
                    yield offset, _task_of(run)
            offset += len(line)


def _run_in(line: bytes, place: str) -> ReasoningTrace | _Row:
    """Read a line in any form that ``keep`` writes with the run's text."""
    try:
        row: Any = parse_json(line, _LIMITS)
        if not isinstance(row, dict) or "messages" in row:
            return _Row.model_validate(row)
        if "chosen" in row:
            return _Row.model_validate(row | {"messages": row["chosen"]})
        if "source" in row:
            source, trace_id = row["source"], row.get("trace_id")
            decision = Decision.model_validate(row["decision"]) if row.get("decision") else None
            domain = decision.domain if decision else "default"
            # Without a decision, the line belongs to a set, which has only successes: by their records or by an option.
            success = not decision or decision.succeeded
            is_trace = isinstance(source, dict) and "@type" in source
            converted = source if is_trace else next(convert([source], domain=domain, success=success, **_SUPPLIED), None)
            row = converted | {"id": trace_id} if isinstance(converted, dict) else {}
        if "@type" not in row:
            raise NotConverted(0, [])
        return check_trace(row, _LIMITS)
    except InvalidTrace as error:
        raise ScorerError(f"{place}: {error}") from None
    except (NotConverted, ValidationError):
        raise ScorerError(f"{place}: expected a run with its text, as `kp-scorer keep` writes it") from None


def _task_of(run: ReasoningTrace | _Row) -> str:
    if isinstance(run, ReasoningTrace):
        return run.task.objective
    # The task in a row may be an id, which says nothing.
    asked = (message.get("content") for message in run.messages if message.get("role") == "user")
    return next((content for content in asked if content and isinstance(content, str)), run.task)


def _read(similarity: float, file: Path, offset: int) -> SimilarRun:
    with open_regular(file) as lines:
        lines.seek(offset)
        run = _run_in(lines.readline(_LIMITS.message_bytes + 1), f"{file.name}, byte {offset}")
    similarity, task = round(similarity, 4), _task_of(run)
    if isinstance(run, ReasoningTrace):
        score, messages = run.metadata.quality_score, chat_of_trace(run).messages
        return SimilarRun(similarity, run.id, run.metadata.task_domain, task, score, messages)
    return SimilarRun(similarity, run.trace_id, run.domain, task, run.score, run.messages)


def as_prompt(runs: Sequence[SimilarRun], most_tokens: int = 2_000) -> str:
    """Return runs as a block of text for an agent's context, of at most ``most_tokens``, where two bytes count as a token.

    The block has no system texts. To save room, it cuts long messages first, and then leaves out the least similar runs. Each
    message is JSON on a line of its own, so that none can look like another part of the block.
    """
    most_bytes = most_tokens * _BYTES_PER_TOKEN
    # Write each run only once for each length, because the loop below tries several lengths and numbers of runs.
    spoken = [[message for message in run.messages if message.get("role") != "system"] for run in runs]
    written = [[escaped(json.dumps(message, ensure_ascii=False)) for message in messages] for messages in spoken]
    blocks = {longest: list(map(partial(_block, longest=longest), runs, written)) for longest in _LONGEST_MESSAGES}
    sizes = {
        longest: list(accumulate((len(block.encode()) for block in blocks[longest]), initial=len(_INTRODUCTION)))
        for longest in blocks
    }
    for number, longest in product(range(len(runs), 0, -1), _LONGEST_MESSAGES):
        if sizes[longest][number] <= most_bytes:
            return "".join([_INTRODUCTION, *blocks[longest][:number]])
    # Cut even the nearest run, which does not fit as a whole.
    text = "".join([_INTRODUCTION, *blocks[_LONGEST_MESSAGES[-1]][:1]]) if runs else ""
    return text.encode()[:most_bytes].rpartition(b"\n")[0].decode()


def _block(run: SimilarRun, lines: Sequence[str], longest: int) -> str:
    cut = (line if len(line) <= longest else f"{line[:longest]}…" for line in lines)
    return "\n".join([f"\n## A run of similarity {run.similarity:.2f}", *cut]) + "\n"
