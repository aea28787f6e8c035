"""The real model: promise by promise, for each engine, on texts of every length; README's test scores the real traces."""

from itertools import chain

import numpy as np
import pytest
from kp_scorer import score_traces
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.embedding.embedder import Embedder
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


def test_vectors_are_those_of_every_other_engine(compared: Embedder, torch_on_cpu: Embedder) -> None:
    of_samples = [decode_trace(trace, Limits()).embedding_text for trace in sample_traces()[::4]]
    just_below_a_full_one = ["tree river castle " * 4 + "tree " * count for count in (1, 2, 480, 497, 498, 499)]
    for texts in (of_samples, just_below_a_full_one):
        cosines = (compared.embed(texts) * torch_on_cpu.embed(texts)).sum(axis=1)
        assert cosines.min() > 1 - 1e-4
    assert compared.space == torch_on_cpu.space
    assert compared.dimensions == torch_on_cpu.dimensions


def test_texts_get_the_same_unit_vectors_together_and_alone(embedder: Embedder) -> None:
    texts = [
        "",
        "a",
        "e\u0301 \u96e8 \u2603",
        "refund a double charge",
        "tree " * 30,
        "tree " * 31,
        "river " * 200,
        "b " * 2_000,
    ]
    together = embedder.embed(texts)
    assert together.shape == (len(texts), embedder.dimensions)
    assert together.dtype == np.float32
    assert np.allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    # Half the digits of single precision, or of half precision where sums are done in another order.
    tolerance = 1e-5 if "f32" in embedder.engine else 2e-3
    assert np.abs(together - alone).max() < tolerance
    assert embedder.embed([]).shape == (0, embedder.dimensions)


def test_a_decision_says_how_many_tokens_were_embedded_and_how_many_there_are(openvino: Embedder) -> None:
    short, long = fresh_samples(2)
    short["task"]["objective"], short["steps"] = "tree", [{"step_id": 0, "type": "thought"}]
    long["task"]["objective"] = "tree " * 600
    window = NoveltySettings().window()
    decider = Decider(MemoryLedger(), Policy(), NoveltyMeter(openvino, MemoryLog(window), window), max_attempts=5)
    by_model = decider.decide([decode_trace(trace, Limits()) for trace in (short, long)])
    by_others = [score_traces([short, long], load_settings({"embedding.embedder": name})) for name in ("none", "words")]
    decided = [each for each in chain(by_model, *by_others) if isinstance(each, Decision)]
    counts = [(each.novelty.embedded_tokens, each.novelty.text_tokens) for each in decided]
    assert counts == [(3, 3), (512, None), *[(None, None)] * 4]
