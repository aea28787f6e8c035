"""The real model: promise by promise, for each engine, on real traces and on texts of every length."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kp_scorer import score_traces
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.embedding import openvino_engine
from kp_scorer.embedding.embedder import Embedder, Vectors
from kp_scorer.errors import SettingsError
from kp_scorer.ledger.records import MemoryLedger
from kp_scorer.novelty import MemoryLog
from kp_scorer.scoring import Policy
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import NoveltySettings

from tests.support.builders import load_embedder
from tests.support.traces import fresh_samples, sample_traces


@pytest.fixture(scope="module")
def openvino() -> Embedder:
    return load_embedder(embedder="openvino")


@pytest.fixture(scope="module")
def torch_on_cpu() -> Embedder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kp_scorer.embedding.select._GPU_DEVICES", ())
        return load_embedder(embedder="torch")


@pytest.fixture(scope="module")
def torch_on_gpu() -> Embedder:
    import torch  # which takes seconds, in every process that collects this file

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU that torch can use")
    return load_embedder(embedder="torch")


@pytest.fixture(scope="module", params=["openvino", "torch_on_cpu", "torch_on_gpu"])
def embedder(request: pytest.FixtureRequest) -> Embedder:
    selected: Embedder = request.getfixturevalue(request.param)
    return selected


@pytest.fixture(scope="module", params=["openvino", "torch_on_gpu"])
def compared(request: pytest.FixtureRequest) -> Embedder:
    """One that is held against torch on the CPU."""
    selected: Embedder = request.getfixturevalue(request.param)
    return selected


def decider_with(embedder: Embedder) -> Decider:
    window = NoveltySettings().window()
    return Decider(MemoryLedger(), Policy(), NoveltyMeter(embedder, MemoryLog(window), window), max_attempts=5)


@pytest.mark.slow
def test_real_traces_in_order_get_the_reference_scores(
    embedder: Embedder, real_traces: list[dict[str, object]], expected_scores: dict[str, float]
) -> None:
    decider = decider_with(embedder)
    # All of them, by the default engine, are scored as README shows it.
    traces = [decode_trace(payload, Limits()) for payload in real_traces[:20]]
    worst = 0.0
    for start in range(0, len(traces), 8):
        for decision in decider.decide(traces[start : start + 8]):
            assert isinstance(decision, Decision)
            worst = max(worst, abs(decision.score - expected_scores[decision.trace_id]))
    assert worst < 0.001


def test_vectors_are_those_of_every_other_engine(compared: Embedder, torch_on_cpu: Embedder) -> None:
    of_samples = [decode_trace(trace, Limits()).embedding_text for trace in sample_traces()]
    just_below_a_full_one = ["tree river castle " * 4 + "tree " * count for count in (1, 2, 3, 4, 480, 490, 497, 498, 499, 500)]
    for texts in (of_samples, just_below_a_full_one):
        cosines = (compared.embed(texts) * torch_on_cpu.embed(texts)).sum(axis=1)
        assert cosines.min() > 1 - 1e-4
    assert compared.space == torch_on_cpu.space
    assert compared.dimensions == torch_on_cpu.dimensions


def test_vectors_are_float32_of_unit_length(embedder: Embedder) -> None:
    vectors = embedder.embed(["a", "b " * 2_000, ""])
    assert vectors.shape == (3, embedder.dimensions)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert embedder.embed([]).shape == (0, embedder.dimensions)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=200), min_size=1, max_size=12))
def test_a_batch_gives_what_one_by_one_gives(embedder: Embedder, texts: list[str]) -> None:
    together = embedder.embed(texts)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    # Half the digits of single precision, or of half precision where sums are done in another order.
    tolerance = 1e-5 if "f32" in embedder.engine else 2e-3
    assert np.abs(together - alone).max() < tolerance


# A test below has two.
@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same_vectors(openvino: Embedder, threads: int) -> None:
    texts = ["tree " * count for count in (1, 2, 2, 30, 200, 600, 600)]
    selected = load_embedder(embedder="openvino", threads=threads)
    assert np.abs(selected.embed(texts) - openvino.embed(texts)).max() < 2e-3


class WrongSideBySide(openvino_engine._Streams):  # nothing else makes passes side by side wrong
    """Streams that give another vector for the last of several texts, as they once did for a process's whole life."""

    def run(self, inputs: Sequence[Any]) -> list[Vectors]:
        selected = super().run(inputs)
        return [*selected[:-1], selected[-1][:, ::-1]] if len(selected) > 1 else selected


def test_streams_that_give_one_text_two_vectors_are_compiled_anew(
    openvino: Embedder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = openvino_engine._Streams
    made: list[int] = []

    def wrong_at_first(core: Any, model: Any, streams: int) -> openvino_engine._Streams:
        made.append(streams)
        return (WrongSideBySide if len(made) <= 4 else right)(core, model, streams)

    monkeypatch.setattr(openvino_engine, "_Streams", wrong_at_first)
    selected = load_embedder(embedder="openvino", threads=2)
    assert made == [1, 1, 2, 2] * 2
    assert [record.msg for record in caplog.records] == ["streams_disagree"]
    texts = ["tree " * count for count in (1, 30, 600, 600)]
    assert np.abs(selected.embed(texts) - openvino.embed(texts)).max() < 2e-3


def test_an_engine_that_gives_one_text_two_vectors_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_engine, "_Streams", WrongSideBySide)
    monkeypatch.setattr(openvino_engine, "_TRIES", 1)
    with pytest.raises(SettingsError, match="openvino gives different vectors for one text"):
        load_embedder(embedder="openvino", threads=2)
    assert load_embedder(threads=2).engine.startswith("torch")


def test_a_decision_says_how_many_tokens_were_embedded_and_how_many_there_are(openvino: Embedder) -> None:
    short, long = fresh_samples(2)
    short["task"]["objective"], short["steps"] = "tree", [{"step_id": 0, "type": "thought"}]
    long["task"]["objective"] = "tree " * 600
    by_model = decider_with(openvino).decide([decode_trace(trace, Limits()) for trace in (short, long)])
    by_others = [score_traces([short, long], load_settings({"embedding.embedder": name})) for name in ("none", "words")]
    decided = [each for each in chain(by_model, *by_others) if isinstance(each, Decision)]
    counts = [(each.novelty.embedded_tokens, each.novelty.text_tokens) for each in decided]
    assert counts == [(3, 3), (512, None), *[(None, None)] * 4]
