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
_HEAD: Final = 128  # Axes compared first: of a real text's 384 they hold five sixths.
_ROWS: Final = 4_096
_AT_ONCE: Final = 32
_SLACK: Final = 1e-5  # Much more than the rounding of a bound.
_MANY: Final = 4  # If one entry in so many reaches the bound, copying those costs more than comparing all.


class PinnedSet(NamedTuple):
    """A set of one space: an id for each of ``vectors``, float32 unit vectors of shape (entries, dimensions)."""

    kind: Literal["traces", "texts"]
    ids: Sequence[str]  # Of each entry its trace's id, or the number of its text's line in the file.
    vectors: NDArray[np.float32]

    @property
    def version(self) -> str:
        """The digest of all that it holds."""
        digest = blake2b("\0".join([self.kind, *self.ids, ""]).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.vectors, "<f4").data)
        return digest.hexdigest()


class PinnedSearch:
    """Finds what is nearest in a set: exactly, and among real texts in the time that a third of the set takes to read.

    By the set's principal axes, a vector is a head, which holds most of it, and a tail. A similarity is at most the product of
    the heads and that of the tails' lengths (Cauchy and Schwarz). Only entries of which that reaches the similarity of the most
    promising one are compared whole.
    """

    def __init__(self, pinned: PinnedSet) -> None:
        """Find the axes: half a second for 100,000 entries, and a third more of memory."""
        self._ids, self._vectors = pinned.ids, pinned.vectors
        _, axes = np.linalg.eigh(self._vectors.T @ self._vectors)
        # By their weight, which increases.
        self._axes: NDArray[np.float32] = np.ascontiguousarray(axes[:, -_HEAD:])
        starts = range(0, len(self._ids), _ROWS)
        parts = [self._divided(self._vectors[start : start + _ROWS]) for start in starts]
        self._heads, self._tails = (np.concatenate(part) for part in zip(*parts, strict=True))

    def nearest(self, vectors: NDArray[np.float32]) -> list[tuple[str, float]]:
        """The id of the first entry that is most similar to each of ``vectors``, and the cosine similarity, -1..1."""
        nearest: list[tuple[str, float]] = []
        # Bounds take 0.4 MB for each of them.
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
        self._by_name: dict[str, tuple[str, PinnedSet, PinnedSearch]] = {}
        self.has_texts = False  # Whether objectives are compared, too. Any thread may ask.
        self.missing = ""  # Which set is gone, since when nothing is decided; empty if none. Any thread may read it.

    def load(self) -> None:
        """Read all sets; raises SettingsError if one does not exist, ServiceUnavailable if they cannot be read."""
        if absent := _absent(self._versions()):
            raise SettingsError(absent)
        self.refresh()

    def refresh(self) -> None:
        """Read anew what has another version; raises ServiceUnavailable if a set is gone."""
        versions = self._versions()
        self.missing = _absent(versions)
        if self.missing:
            raise ServiceUnavailable(self.missing)
        for name, version in versions:
            if name not in self._by_name or self._by_name[name][0] != version:
                # First, or both would take memory at once.
                self._by_name.pop(name, None)
                pinned = self._sets.read(name)
                if pinned is None or pinned.vectors.shape[1] != self._dimensions:
                    self.missing = f"novelty.pinned: {name}: the set is damaged; pin it again by `kp-scorer cache pin`"
                    raise ServiceUnavailable(self.missing)
                self._by_name[name] = pinned.version, pinned, PinnedSearch(pinned)
        self.has_texts = any(pinned.kind == "texts" for _, pinned, _ in self._by_name.values())

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
    """Recompute what decisions on a log's entries say of pinned sets.

    Returns how many agree, those that differ, and how many cannot be checked: the set has another version now, or has texts,
    and no log has the vectors of objectives.
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
