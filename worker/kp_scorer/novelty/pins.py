"""Pinned sets of traces or of texts, such as a benchmark's tasks, that every trace is compared with besides the window.

Pinned traces are compared with the vector of a trace, and pinned texts with that of its objective.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kp_scorer.decision import Decision, Outcome, Pinned
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.novelty.log import Entry
from kp_scorer.novelty.verification import TOLERANCE

NO_EMBEDDER: Final = (
    "novelty.pinned: no embedder to compare with: install kp-scorer[embedding], or set embedding.embedder to words"
)
_HEAD: Final = 128  # The axes that are compared first. They hold five sixths of a real text's vector of 384.
_ROWS: Final = 4_096
_AT_ONCE: Final = 32
_SLACK: Final = 1e-5  # This is far more than the rounding error of a bound.
_MANY: Final = 4  # If one in this many entries reaches the bound, comparing all costs less than copying those that do.


class PinnedSet(NamedTuple):
    """A set of vectors of one space: float32 unit vectors of shape (entries, dimensions), and an id for each."""

    kind: Literal["traces", "texts"]
    ids: Sequence[str]  # For each entry, the id of its trace, or the line number of its text.
    vectors: NDArray[np.float32]

    @property
    def version(self) -> str:
        """The digest of the whole set."""
        digest = blake2b("\0".join([self.kind, *self.ids, ""]).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.vectors, "<f4").data)
        return digest.hexdigest()


class PinnedSearch:
    """Finds the nearest entry of a set: exactly, and for real texts in the time of reading a third of the set.

    By the principal axes of the set, each vector is divided into a head, which holds most of it, and a tail. A similarity is at
    most the product of the heads plus that of the lengths of the tails (Cauchy and Schwarz). Only entries for which that bound
    reaches the similarity of the most promising entry are compared as a whole.
    """

    def __init__(self, pinned: PinnedSet) -> None:
        """Find the axes. For 100,000 entries this takes half a second, and a third of the set's memory again."""
        self._ids, self._vectors = pinned.ids, pinned.vectors
        _, axes = np.linalg.eigh(self._vectors.T @ self._vectors)
        # The axes come in the order of increasing weight.
        self._axes: NDArray[np.float32] = np.ascontiguousarray(axes[:, -_HEAD:])
        starts = range(0, len(self._ids), _ROWS)
        parts = [self._divided(self._vectors[start : start + _ROWS]) for start in starts]
        self._heads, self._tails = (np.concatenate(part) for part in zip(*parts, strict=True))

    def nearest(self, vectors: NDArray[np.float32]) -> list[tuple[str, float]]:
        """Return for each vector the most similar entry, the first if several are equal, and the cosine similarity, -1..1."""
        nearest: list[tuple[str, float]] = []
        # Take some vectors at a time, as the bounds of each take 0.4 MB for 100,000 entries.
        for some in np.split(vectors, range(_AT_ONCE, len(vectors), _AT_ONCE)):
            heads, tails = self._divided(some)
            nearest += map(self._nearest, some, heads @ self._heads.T, tails)
        return nearest

    def _nearest(self, vector: NDArray[np.float32], bounds: NDArray[np.float32], tail: float) -> tuple[str, float]:
        bounds += tail * self._tails
        least = vector @ self._vectors[bounds.argmax()] - _SLACK
        (rows,) = np.nonzero(bounds >= least)
        if not 0 < len(rows) * _MANY <= len(bounds):
            rows = np.arange(len(bounds))
            similarities = self._vectors @ vector
        else:
            similarities = self._vectors[rows] @ vector
        best = similarities.argmax()
        return self._ids[int(rows[best])], float(np.clip(similarities[best], -1, 1))

    def _divided(self, vectors: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        heads = vectors @ self._axes
        return heads, np.linalg.norm(vectors - heads @ self._axes.T, axis=1)


class PinnedSets(Protocol):
    """The storage of the pinned sets of one space."""

    def versions(self, names: Sequence[str]) -> list[str | None]:
        """Return the version of each of these sets; None for a set that does not exist."""

    def read(self, name: str) -> PinnedSet | None:
        """Return the current version of a set; None if it does not exist, or is damaged."""


class Pins:
    """The sets that the settings name, as a process holds them. The thread that owns the mirror owns them too."""

    def __init__(self, sets: PinnedSets, limits: Mapping[str, tuple[float, Outcome | None]], dimensions: int) -> None:
        """Load nothing yet. ``limits`` has for each set the largest similarity, and the least outcome of a trace beyond it."""
        self._sets = sets
        self._limits = limits
        self._dimensions = dimensions
        self._by_name: dict[str, tuple[str, PinnedSet, PinnedSearch]] = {}
        self.has_texts = False  # True if objectives are compared, too. Any thread may read it.
        self.missing = ""  # The error about a missing set, which stops all deciding; empty if none. Any thread may read it.

    def load(self) -> None:
        """Read all sets; raise SettingsError if one does not exist, ServiceUnavailable if they cannot be read."""
        if absent := _absent(self._versions()):
            raise SettingsError(absent)
        self.refresh()

    def refresh(self) -> None:
        """Read the sets whose versions have changed; raise ServiceUnavailable if a set is gone."""
        versions = self._versions()
        self.missing = _absent(versions)
        if self.missing:
            raise ServiceUnavailable(self.missing)
        for name, version in versions:
            if name not in self._by_name or self._by_name[name][0] != version:
                # Drop the old version first, as both would take memory at once.
                self._by_name.pop(name, None)
                pinned = self._sets.read(name)
                if pinned is None or pinned.vectors.shape[1] != self._dimensions:
                    self.missing = f"novelty.pinned: {name}: the set is damaged; pin it again by `kp-scorer cache pin`"
                    raise ServiceUnavailable(self.missing)
                self._by_name[name] = pinned.version, pinned, PinnedSearch(pinned)
        self.has_texts = any(pinned.kind == "texts" for _, pinned, _ in self._by_name.values())

    def compare(
        self, vectors: NDArray[np.float32], objective_vectors: Sequence[NDArray[np.float32] | None]
    ) -> list[tuple[Pinned, ...]]:
        """Return for each trace its nearest entry in each set, in the order of the settings.

        ``vectors`` has shape (traces, dimensions). An objective vector is None if no texts were pinned when it would have been
        embedded; if some are pinned now, this raises ServiceUnavailable, and the traces must be embedded again.
        """
        objectives = [vector for vector in objective_vectors if vector is not None]
        if self.has_texts and len(objectives) < len(vectors):
            raise ServiceUnavailable("novelty.pinned: a set of texts was pinned meanwhile, so objectives must be embedded")
        columns = []
        for name, (limit, outcome) in self._limits.items():
            version, pinned, search = self._by_name[name]
            nearest = search.nearest(vectors if pinned.kind == "traces" else np.stack(objectives))
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


def _absent(versions: Sequence[tuple[str, str | None]]) -> str:
    names = ", ".join(name for name, version in versions if version is None)
    return names and f"novelty.pinned: {names}: not pinned in this space; see `kp-scorer cache pin`"


def audit_pinned(
    decisions: Sequence[Decision], entries: Sequence[Entry], sets: PinnedSets
) -> tuple[int, list[dict[str, Any]], int]:
    """Recompute the similarities to pinned sets in the decisions on the entries of a log.

    Returns the number of agreeing ones, the differing ones, and the number of those that cannot be checked: their sets have
    another version now, or hold texts, for which the log has no vectors of objectives.
    """
    vectors = {str(entry.place): entry.vector for entry in entries}
    pairs = [(decision, pinned) for decision in decisions for pinned in decision.pinned]
    current = {name: sets.read(name) for name in {pinned.name for _, pinned in pairs}}
    of_traces = {
        (name, each.version): (PinnedSearch(each), each.vectors.shape[1:])
        for name, each in current.items()
        if each and each.kind == "traces"
    }
    agreeing, differences = 0, list[dict[str, Any]]()
    for decision, pinned in pairs:
        search, shape = of_traces.get((pinned.name, pinned.version), (None, None))
        vector = vectors.get(decision.novelty.entry or "")
        if search is None or vector is None or vector.shape != shape:
            continue
        ((_, similarity),) = search.nearest(vector[None])
        if abs(similarity - pinned.similarity) <= TOLERANCE:
            agreeing += 1
        else:
            row = {"trace_id": decision.trace_id, "pinned": pinned.name}
            differences.append({**row, "decided": pinned.similarity, "recomputed": similarity})
    return agreeing, differences, len(pairs) - agreeing - len(differences)
