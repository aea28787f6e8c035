"""Measures the novelty of traces: embeds them, and compares them with the novelty log and with pinned sets."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Final

from kp_scorer.decision import Nearest, Novelty, Pinned
from kp_scorer.embedding.embedder import CheckedEmbedder, Counts, Embedder, TokenizedText, Vector
from kp_scorer.logs import library_logger
from kp_scorer.novelty import Candidate, NoveltyCache, NoveltyLog, Placement, Window
from kp_scorer.novelty.pins import Pins
from kp_scorer.settings.sections import UnreadableAction
from kp_scorer.trace import Digests, ReasoningTrace

log = library_logger(__name__)

UNREADABLE: Final = (
    "the model does not know the script of the text, so all such traces look alike: set embedding.embedder to words, "
    "which reads every script, or novelty.unreadable to unknown"
)
Comparison = tuple[Novelty, tuple[Pinned, ...]]  # The results of comparing with earlier traces, and with pinned sets.


class NoveltyMeter:
    """An embedder with the novelty log, the window and the pinned sets that its vectors are compared with."""

    def __init__(
        self,
        embedder: Embedder,
        log: NoveltyLog,
        window: Window,
        pins: Pins | None = None,
        unreadable: UnreadableAction = "score",
    ) -> None:
        self.embedder = embedder
        self._unreadable = unreadable
        self._has_logged_unreadable = False
        self._window = window
        self.cache = NoveltyCache(log, window, embedder.dimensions)
        self.checked_embedder = CheckedEmbedder(embedder)
        self._pins = pins

    @property
    def missing(self) -> str:
        """The error about a pinned set that is gone or damaged, because of which nothing is decided; empty if there is none."""
        return self._pins.missing if self._pins else ""

    def objective_of(self, trace: ReasoningTrace) -> str | None:
        """Return a trace's objective if it is to be embedded as well, because texts are pinned; otherwise None."""
        return trace.task.objective if self._pins and self._pins.has_texts else None

    def embed(
        self, traces: Sequence[ReasoningTrace], *, alone: bool = False
    ) -> list[tuple[TokenizedText, Vector, Vector | None]]:
        """Embed traces, and their objectives where texts are pinned; return each trace's text and two vectors, in order.

        ``alone`` means that there is one trace, which failed before together with others. Raises EmbedderUnhealthy if the
        embedder fails on every text; any other error is the fault of the traces.
        """
        owns = self._embed([self.embedder.recipe.text(trace) for trace in traces], alone=alone)
        objectives = [objective for objective in map(self.objective_of, traces) if objective is not None]
        embedded = self._embed(objectives, alone=alone, plain=True) if objectives else [(None, None)] * len(traces)
        return [(*own, vector) for own, (_, vector) in zip(owns, embedded, strict=True)]

    def _embed(self, texts: Sequence[str], *, alone: bool, plain: bool = False) -> Sequence[tuple[TokenizedText, Vector]]:
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        tokenized = self.checked_embedder.tokenize_all(list(rows), alone=alone, plain=plain)
        vectors = self.checked_embedder.embed(tokenized, alone=alone)
        return [(tokenized[rows[text]], vectors[rows[text]]) for text in texts]

    def candidate(self, trace: ReasoningTrace, digests: Digests, vector: Vector) -> Candidate:
        """Return a trace as a candidate for the log. With ``novelty.against = "succeeded"``, only successes are comparable."""
        least = self._window.succeeded_confidence
        is_comparable = least is None or (trace.metadata.success and trace.outcome.confidence >= least)
        return Candidate(trace.id, digests.content, vector, is_comparable, digests.visible)

    def place(self, candidates: Sequence[Candidate], objectives: Sequence[Vector | None] = ()) -> list[Comparison | None]:
        """Place candidates in the log, which is idempotent, and compare each of them and its objective.

        The result of a candidate is None if the log has its id with another digest. Raises ServiceUnavailable if the log or the
        pinned sets cannot be reached.
        """
        if self._pins:
            # Refresh first, because a trace without its pinned sets cannot be decided, and must not be placed.
            self._pins.refresh()
        placements = self.cache.place(candidates)
        admitted = [placement.place for placement in placements if placement]
        pinned: Iterator[tuple[Pinned, ...]] = repeat(())
        if self._pins and admitted:
            compared = [vector for vector, placement in zip(objectives, placements, strict=True) if placement]
            pinned = iter(self._pins.compare(self.cache.mirror.vectors(admitted), compared))
        return [(self._novelty(placement), next(pinned)) if placement else None for placement in placements]

    def with_counts(self, novelty: Novelty, counts: Counts) -> Novelty:
        """Return a novelty with the numbers of tokens; it becomes unknown if the text is unreadable, unless it is a copy."""
        *tokens, has_words = counts
        novelty = novelty.model_copy(update=dict(zip(Counts._fields, tokens, strict=False)))
        if novelty.is_unreadable and not self._has_logged_unreadable:
            self._has_logged_unreadable = True
            log.warning("text_unreadable", unknown_tokens=novelty.unknown_tokens, detail=UNREADABLE)
        is_unknown = not has_words or (novelty.is_unreadable and self._unreadable == "unknown")
        if is_unknown and novelty.nearest and not novelty.duplicate_of:
            return novelty.model_copy(update={"source": "unreadable", "nearest": None})
        return novelty

    def _novelty(self, placement: Placement) -> Novelty:
        nearest = placement.nearest
        return Novelty(
            source="embedding" if nearest else "empty_cache",
            nearest=Nearest(trace_id=nearest.trace_id, similarity=nearest.similarity) if nearest else None,
            duplicate_of=nearest.trace_id if nearest and nearest.is_duplicate else None,
            embedder=self.embedder.name,
            space=self.embedder.space,
            entry=str(placement.place),
        )
