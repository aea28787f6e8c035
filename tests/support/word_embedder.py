"""An embedder small enough to reason about, and a decider in memory with it."""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.embedding.embedder import TRACE, Embedder, Vectors
from kp_scorer.novelty import MemoryLog, Window
from kp_scorer.novelty.pins import Pins
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.scoring import Policy
from kp_scorer.store.records import MemoryLedger
from kp_scorer.trace import ReasoningTrace

WINDOW: Final = Window(max_elements=1_000, ttl_ms=60_000, slack_elements=1_000, slack_ms=60_000)


class WordEmbedder(Embedder):
    """An embedder whose dimensions are signs of a vote by the words' hashes, so that every similarity is exact in float32."""

    name = "words"
    space = "words-1"
    dimensions = 64
    recipe = TRACE

    def __init__(self) -> None:
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.texts.extend(texts)
        votes = np.array([sum((self._vote(word) for word in text.split()), start=np.zeros(64)) for text in texts])
        return np.where(votes >= 0, 0.125, -0.125).astype(np.float32)

    @staticmethod
    def _vote(word: str) -> Any:
        bits = np.frombuffer(hashlib.blake2b(word.encode(), digest_size=8).digest(), np.uint8)
        return np.unpackbits(bits) * 2.0 - 1.0


def word_decider(
    policy: Policy | None = None,
    *,
    embedder: WordEmbedder | None = None,
    ledger: MemoryLedger | None = None,
    window: Window = WINDOW,
    log: MemoryLog | None = None,
    pins: Pins | None = None,
    **options: Any,
) -> Decider:
    """Return a decider in memory. Unless a log is given, its clock stands still."""
    novelty = NoveltyMeter(embedder or WordEmbedder(), log or MemoryLog(window, lambda: 1_000), window, pins)
    return Decider(ledger or MemoryLedger(), policy or Policy(), novelty, max_attempts=5, **options)


def decide_one(decider: Decider, trace: ReasoningTrace) -> Decision:
    (decision,) = decider.decide([trace])
    assert isinstance(decision, Decision)
    return decision
