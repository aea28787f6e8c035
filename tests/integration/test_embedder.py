"""The real model: promise by promise, on real traces and on texts of every length."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.decider import Decider, NoveltyStage
from worker.decision import Decision
from worker.embedding import Embedder, select_embedder
from worker.ledger import MemoryLedger
from worker.novelty import MemoryLog, NoveltyCache, Window
from worker.scoring import Policy
from worker.settings import EmbeddingSettings, NoveltySettings
from worker.trace import Limits, decode_trace


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    found = select_embedder(EmbeddingSettings(required=True))
    assert found
    return found


@pytest.mark.slow
def test_real_traces_in_order_get_the_reference_scores(
    embedder: Embedder, real_traces: list[dict[str, object]], expected_scores: dict[str, float]
) -> None:
    window = Window.of(NoveltySettings())
    cache = NoveltyCache(MemoryLog(window), window, embedder.dimensions)
    decider = Decider(MemoryLedger(), Policy(), NoveltyStage(embedder, cache))
    traces = [decode_trace(payload, Limits()) for payload in real_traces]
    worst = 0.0
    for start in range(0, len(traces), 8):
        for decision in decider.decide(traces[start : start + 8]):
            assert isinstance(decision, Decision)
            worst = max(worst, abs(decision.score - expected_scores[decision.trace_id]))
    assert worst < 0.001


def test_vectors_are_float32_of_unit_length(embedder: Embedder) -> None:
    vectors = embedder.embed(["a", "b " * 2_000, ""])
    assert vectors.shape == (3, embedder.dimensions)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=200), min_size=1, max_size=12))
def test_a_batch_gives_what_one_by_one_gives(embedder: Embedder, texts: list[str]) -> None:
    together = embedder.embed(texts)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    assert np.abs(together - alone).max() < 1e-5


def test_only_the_first_512_tokens_count(embedder: Embedder) -> None:
    # Each word is one token; one more is spent on the opening [CLS], none on a closing [SEP].
    counted = "tree " * 511
    same, other = embedder.embed([counted + "river " * 50, counted + "castle " * 70])
    shorter = embedder.embed(["tree " * 510 + "river"])[0]
    assert np.abs(same - other).max() < 1e-6
    assert np.abs(same - shorter).max() > 1e-4


def test_similar_texts_are_nearer_than_others(embedder: Embedder) -> None:
    refund, again, weather = embedder.embed(
        ["refund a double charge for the customer", "give the customer back what was charged twice", "rain over the sea"]
    )
    assert refund @ again > 0.6 > 0.3 > refund @ weather


def test_without_embedder_there_is_none() -> None:
    assert select_embedder(EmbeddingSettings(embedder="none")) is None
