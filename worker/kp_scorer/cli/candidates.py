"""Holds the runs that ``kp-scorer keep --best`` chooses among, and gathers those that were kept before or decided by a fleet.

Their documents and their vectors wait on disk until all of them are known.
"""

import base64
import json
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np

from kp_scorer.cli.input import read_files
from kp_scorer.cli.output import note_count, note_damaged
from kp_scorer.cli.unpacking import lines_in, open_input, unpacked
from kp_scorer.coverage import Vectors
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.trace import ReasoningTrace

_VECTOR: Final = np.dtype("<f2")  # The type of a vector in a row. Its rounding moves a similarity by some 1e-4.
_QUICK: Final = 1  # The fastest level of zlib, because documents wait on disk only for seconds.
_LOOKED_UP_AT_ONCE: Final = 500
_LONGEST_ROW: Final = 2**26  # The longest line of a kept run.


class Run(NamedTuple):
    """A run to choose from."""

    trace_id: str
    domain: str
    eligible: bool  # True if it may be kept.
    success: bool
    task: int = 0  # The hash of its task; 0 for decisions from Redis, which has no tasks.
    score: float = 0.0
    file: str = ""
    line: int = 0


class Candidates(ExitStack):
    """All runs to choose from. Their documents and vectors are in temporary files; some 400 bytes a run are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._embedder = WordsEmbedder()
        self._documents = self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - this stack closes it
        self._vectors = self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - this stack closes it
        self.runs: list[Run] = []
        self.repeated = 0  # The number of traces that have the id of an earlier one.
        self._offsets = array("q", [0])  # The offset of each document, and the end of the last one.
        self._all_ids: set[str] = set()
        self._earlier: dict[str, list[tuple[str, Vectors]]] = {}
        self.space = ""  # The space of the vectors from a novelty log.
        self._dimensions = 0  # The dimensions of all vectors, which the first one determines.

    def vector_of(self, trace: ReasoningTrace) -> Vectors:
        """Return the vector of a trace by its words."""
        return self._embedder.embed([self._embedder.recipe.text(trace)])

    def add_earlier(self, trace_id: str, domain: str, vector: Vectors) -> None:
        """Add a run that was kept before. It can stand for other runs of its domain, and is no candidate itself."""
        if trace_id not in self._all_ids:
            self._all_ids.add(trace_id)
            self._earlier.setdefault(domain, []).append((trace_id, vector))

    def add(self, run: Run, vector: Vectors, document: Mapping[str, Any] | None = None) -> None:
        """Add a run, unless there is one with its id. ``document`` is written if the run is kept."""
        if run.trace_id in self._all_ids:
            self.repeated += 1
            return
        self._all_ids.add(run.trace_id)
        self.runs.append(run._replace(domain=sys.intern(run.domain)))
        packed = zlib.compress(json.dumps(dict(document)).encode(), _QUICK) if document else b""
        self._documents.write(packed)
        self._offsets.append(self._offsets[-1] + len(packed))
        self._vectors.write(vector.tobytes())
        self._dimensions = vector.size

    def with_vector(self, row: dict[str, Any], place: int) -> dict[str, Any]:
        """Return a row about a kept run with its vector, from which :meth:`restore_earlier` adds it to a later choice."""
        vector = self.vectors([place]).astype(_VECTOR).tobytes()
        return row | {"space": self.space, "vector": base64.b64encode(vector).decode()}

    def restore_earlier(self, row: Mapping[str, Any]) -> bool:
        """Add a run that was kept before, as its row says; return False if it has no vector of this space."""
        try:
            vector = np.frombuffer(base64.b64decode(row["vector"]), _VECTOR).astype(np.float32)
            if row["space"] != self.space or vector.size != self._dimensions or not np.isfinite(vector).all():
                return False
            self.add_earlier(row["trace_id"], row["domain"], vector)
        except (KeyError, TypeError, ValueError):
            return False
        return True

    def earlier(self, domain: str) -> tuple[list[str], Vectors]:
        """Return the ids of a domain's runs that were kept before, and their vectors, of shape (runs, dimensions)."""
        runs = self._earlier.get(domain, [])
        vectors = [vector.reshape(1, -1) for _, vector in runs]
        return [trace_id for trace_id, _ in runs], np.concatenate([np.empty((0, self._dimensions), np.float32), *vectors])

    def by_score(self, places: Iterable[int]) -> list[int]:
        """Return places in the order of their scores, the highest first; equal scores stay in the order of the places."""
        return sorted(places, key=lambda place: -self.runs[place].score)

    def vectors(self, places: Sequence[int]) -> Vectors:
        """Return the vectors of these runs, of shape (runs, dimensions)."""
        self._vectors.flush()
        rows = np.memmap(self._vectors, np.float32, "r").reshape(-1, self._dimensions)
        return np.array(rows[np.array(places, np.intp)])

    def document(self, place: int) -> dict[str, Any]:
        """Return the document with which a run was added."""
        self._documents.seek(self._offsets[place])
        packed = self._documents.read(self._offsets[place + 1] - self._offsets[place])
        document: dict[str, Any] = json.loads(zlib.decompress(packed))
        return document


def gather_earlier(candidates: Candidates, files: Iterable[Path], limits: Limits) -> None:
    """Add the traces in the files of earlier kept runs; raise BadParameter for a line that is not a trace."""
    for file in files:
        for line in read_files([str(file)], limits):
            if isinstance(line.trace, InvalidTrace):
                raise click.BadParameter(f"{file.name}, line {line.number}: {line.trace}", param_hint="--into")
            candidates.add_earlier(line.trace.id, line.trace.metadata.task_domain, candidates.vector_of(line.trace))


def gather_stored(candidates: Candidates, earlier: Iterable[Path], since: datetime | None, settings: Settings) -> None:
    """Add the decided traces whose vectors are in the newest novelty log, and the runs named in the ``earlier`` files."""
    kept_rows = dict(rows_in(earlier))
    first_ms = since.timestamp() * 1_000 if since else 0.0
    with Store.open(with_endpoints(settings)) as store:
        logs = sorted(store.novelty_logs(), key=lambda log: log.newest(1)[0].place)
        undecided = 0
        log = logs[-1].entries() if logs else iter(())
        candidates.space = logs[-1].space if logs else ""
        while entries := list(islice(log, _LOOKED_UP_AT_ONCE)):
            decided = store.ledger.decided([entry.trace_id for entry in entries])
            for entry, each in zip(entries, decided, strict=True):
                if each is None or each.decision.novelty.entry != str(entry.place):
                    undecided += 1
                    continue
                row = kept_rows.pop(entry.trace_id, None)
                if row and each.succeeded:
                    candidates.add_earlier(entry.trace_id, each.decision.domain, entry.vector)
                elif entry.place.time_ms >= first_ms:
                    eligible = each.succeeded and not each.decision.is_guarded
                    candidates.add(Run(entry.trace_id, each.decision.domain, eligible, each.succeeded), entry.vector)
        note_damaged(store.ledger.damaged)
    unlike = sum(not candidates.restore_earlier(row) for row in kept_rows.values())
    note_count(unlike, "runs that were kept earlier have no vector of this embedder, and stand for no others")
    note_count(len(logs[:-1]), "older novelty logs, of other embedders, are not read")
    note_count(undecided, "entries of the novelty log have no decision at their place, and are left out")


def rows_in(files: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of files that `keep` wrote, which are traces or lines about them, with their trace ids."""
    for file in files:
        with open_input(str(file)) as opened:
            for number, line in lines_in(unpacked(opened), _LONGEST_ROW):
                try:
                    row = json.loads(line)
                    trace_id = str(row.get("trace_id") or row["id"])
                except (ValueError, AttributeError, KeyError, RecursionError):
                    raise click.BadParameter(f"{file.name}, line {number}: expected an id", param_hint="FILE") from None
                yield trace_id, row
