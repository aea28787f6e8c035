"""Pinned sets: traces, or plain texts such as a benchmark's tasks, that every trace is compared with, whatever the window.

A trace's vector is compared with traces; with texts that of its objective alone.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kp_scorer.decision import Decision, Outcome, Pinned
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.novelty.audit import TOLERANCE
from kp_scorer.novelty.log import Entry

NO_EMBEDDER: Final = (
    "novelty.pinned: no embedder to compare with: install kp-scorer[embedding], or set embedding.embedder to words"
)
_SCAN_ROWS: Final = 2_048
"""Rows compared at once: 3 MB of 384 float32 each, which stay in a core's cache while a batch is compared with them."""


class PinnedSet(NamedTuple):
    """A set of one space: an id for each of ``vectors``, float32 unit vectors of shape (entries, dimensions)."""

    kind: Literal["traces", "texts"]
    ids: Sequence[str]
    """Of each entry its trace's id, or the number of its text's line in the file."""
    vectors: NDArray[np.float32]

    @property
    def version(self) -> str:
        """The digest of all that it holds."""
        digest = blake2b("\0".join([self.kind, *self.ids, ""]).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.vectors, "<f4").data)
        return digest.hexdigest()

    def nearest(self, vectors: NDArray[np.float32]) -> list[tuple[str, float]]:
        """The id of the first entry that is most similar to each of ``vectors``, and the cosine similarity, -1..1."""
        rows = np.zeros(len(vectors), np.intp)
        best = np.full(len(vectors), -np.inf, np.float32)
        for start in range(0, len(self.ids), _SCAN_ROWS):
            similarities = vectors @ self.vectors[start : start + _SCAN_ROWS].T
            largest = similarities.max(axis=1)
            is_better = largest > best
            rows[is_better] = start + similarities[is_better].argmax(axis=1)
            best = np.maximum(best, largest)
        return [(self.ids[int(row)], float(np.clip(value, -1, 1))) for row, value in zip(rows, best, strict=True)]


class PinnedSets(Protocol):
    """Where the sets of one space are kept."""

    def versions(self, names: Sequence[str]) -> list[str | None]:
        """The version of each of these sets; None for one that does not exist."""

    def read(self, name: str) -> PinnedSet | None:
        """A set as it is now; None if it does not exist, or is damaged."""


class Pins:
    """The sets that settings name, as a process holds them. The thread that owns the mirror owns it."""

    def __init__(self, sets: PinnedSets, limits: Mapping[str, tuple[float, Outcome | None]], dimensions: int) -> None:
        """Hold nothing yet; of each set the largest similarity, and the outcome that a trace beyond it gets at least."""
        self._sets = sets
        self._limits = limits
        self._dimensions = dimensions
        self._by_name: dict[str, tuple[str, PinnedSet]] = {}
        self.has_texts = False
        """Whether objectives are compared, too. Any thread may ask."""
        self.missing = ""
        """Which set is gone, since when nothing is decided; empty if none. Any thread may read it."""

    def load(self) -> None:
        """Read all sets; raises SettingsError if one does not exist, ServiceUnavailable if they cannot be read."""
        if missing := [name for name, version in self._versions() if version is None]:
            raise SettingsError(f"novelty.pinned: {', '.join(missing)}: not pinned in this space; see `kp-scorer cache pin`")
        self.refresh()

    def refresh(self) -> None:
        """Read anew what has another version; raises ServiceUnavailable if a set is gone."""
        for name, version in self._versions():
            if name not in self._by_name or self._by_name[name][0] != version:
                # First, or both would take memory at once.
                self._by_name.pop(name, None)
                pinned = self._sets.read(name) if version else None
                if pinned is None or pinned.vectors.shape[1] != self._dimensions:
                    self.missing = f"novelty.pinned: {name}: the set is gone or damaged; see `kp-scorer cache pin`"
                    raise ServiceUnavailable(self.missing)
                self._by_name[name] = pinned.version, pinned
        self.missing = ""
        self.has_texts = any(pinned.kind == "texts" for _, pinned in self._by_name.values())

    def compare(self, vectors: NDArray[np.float32], asked: Sequence[NDArray[np.float32] | None]) -> list[tuple[Pinned, ...]]:
        """What each set, in the order of the settings, has nearest to some traces.

        ``vectors``, of shape (traces, dimensions), are theirs, and ``asked`` those of their objectives. ServiceUnavailable if
        texts are pinned only since these traces were embedded: embed them again.
        """
        objectives = [vector for vector in asked if vector is not None]
        if self.has_texts and len(objectives) < len(vectors):
            raise ServiceUnavailable("novelty.pinned: a set was replaced by one of texts meanwhile")
        columns = []
        for name, (limit, outcome) in self._limits.items():
            version, pinned = self._by_name[name]
            nearest = pinned.nearest(vectors if pinned.kind == "traces" else np.stack(objectives))
            parts: dict[str, Any] = {"name": name, "version": version, "limit": limit}
            columns.append(
                [
                    Pinned(**parts, nearest=entry, similarity=value, outcome=outcome if value > limit else None)
                    for entry, value in nearest
                ]
            )
        return list(zip(*columns, strict=True))

    def _versions(self) -> list[tuple[str, str | None]]:
        return list(zip(self._limits, self._sets.versions(list(self._limits)), strict=True))


def audit_pinned(
    decisions: Sequence[Decision], entries: Sequence[Entry], sets: PinnedSets
) -> tuple[int, list[dict[str, Any]], int]:
    """Recompute what decisions on a log's entries say of pinned sets.

    Returns how many agree, those that differ, and how many cannot be checked: the set has another version now, or has texts,
    and no log has the vectors of objectives.
    """
    vectors = {str(entry.place): entry.vector for entry in entries}
    pairs = [(decision, pinned) for decision in decisions for pinned in decision.pinned]
    current = {name: sets.read(name) for name in {pinned.name for _, pinned in pairs}}
    of_traces = {(name, each.version): each for name, each in current.items() if each and each.kind == "traces"}
    agreeing, differences = 0, list[dict[str, Any]]()
    for decision, pinned in pairs:
        checked, vector = of_traces.get((pinned.name, pinned.version)), vectors.get(decision.novelty.entry or "")
        if checked is None or vector is None or vector.shape != checked.vectors.shape[1:]:
            continue
        ((_, similarity),) = checked.nearest(vector[None])
        if abs(similarity - pinned.similarity) <= TOLERANCE:
            agreeing += 1
        else:
            row = {"trace_id": decision.trace_id, "pinned": pinned.name}
            differences.append({**row, "decided": pinned.similarity, "recomputed": similarity})
    return agreeing, differences, len(pairs) - agreeing - len(differences)
