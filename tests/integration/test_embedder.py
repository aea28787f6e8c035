"""The real model: promise by promise, for each engine, on texts of every length; README's test scores the real traces."""

import json
import os
import sys
from itertools import chain
from typing import Final

import numpy as np
import pytest
from kp_scorer import score_traces
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.embedding.embedder import Embedder
from kp_scorer.novelty import MemoryLog
from kp_scorer.report.explanation import decided_words
from kp_scorer.scoring import Policy
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import NoveltySettings
from kp_scorer.store.records import MemoryLedger

from tests.support.builders import load_embedder, make_trace, step
from tests.support.processes import output_of
from tests.support.required import require_torch
from tests.support.traces import fresh_samples, sample_traces


@pytest.fixture(scope="module")
def openvino() -> Embedder:
    return load_embedder(embedder="openvino")


@pytest.fixture(scope="module")
def torch_on_cpu() -> Embedder:
    require_torch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kp_scorer.embedding.select._GPU_DEVICES", ())
        return load_embedder(embedder="torch")


@pytest.fixture(scope="module")
def torch_on_gpu() -> Embedder:
    require_torch()
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
    counts = [(each.novelty.embedded_tokens, each.novelty.unknown_tokens, each.novelty.text_tokens) for each in decided]
    assert counts == [(3, 0, 3), (512, 0, None), *[(None, None, None)] * 4]


FORKING: Final = """
import json, multiprocessing, sys, warnings
from kp_scorer import Scorer
from kp_scorer.errors import EmbedderUnhealthy

warnings.simplefilter("ignore")
first, second = map(json.loads, sys.argv[1:])
scorer = Scorer()
scorer.score(first)

def score():
    try:
        return scorer.score(second).novelty.source
    except EmbedderUnhealthy as error:
        return str(error)

with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.apply_async(score).get(60))
print(scorer.score(second).novelty.source)
"""


@pytest.mark.parametrize(
    ("embedder", "in_child"), [("openvino", "embedder: it was loaded before this process was forked"), ("words", "embedding")]
)
def test_a_scorer_made_before_a_fork_answers_in_the_child(embedder: str, in_child: str) -> None:
    arguments = [sys.executable, "-c", FORKING, *map(json.dumps, fresh_samples(2))]
    output = output_of(*arguments, env=os.environ | {"KP_EMBEDDING_EMBEDDER": embedder}, timeout=300)
    child, parent = output.splitlines()
    assert child.startswith(in_child)
    assert parent == "embedding"


UNKNOWN_SCRIPT: Final = ("จองตั๋วราคาถูกที่สุด", "รดน้ำต้นไม้ทุกวัน")
"""Unrelated tasks in Thai, of which the default model knows no word."""


def decided_by(embedder: Embedder, *objectives: str) -> list[Decision]:
    window = NoveltySettings().window()
    meter = NoveltyMeter(embedder, MemoryLog(window), window)
    traces = [
        make_trace(objective=each, trace_id=f"kp:trace:{number}", steps=[step("observation")])
        for number, each in enumerate(objectives)
    ]
    decided = Decider(MemoryLedger(), Policy(min_novelty=0.1, threshold=0), meter, max_attempts=5).decide(traces)
    return [each for each in decided if isinstance(each, Decision)]


def test_a_script_that_the_model_does_not_know_is_reported_and_scored_anyway(
    openvino: Embedder, caplog: pytest.LogCaptureFixture
) -> None:
    _, second, third = decided_by(openvino, *UNKNOWN_SCRIPT, "ตรวจสอบใบแจ้งหนี้")
    assert (second.novelty.source, second.outcome) == ("embedding", "rejected")
    assert second.dimensions.novelty == pytest.approx(0, abs=1e-4)
    assert (second.novelty.embedded_tokens, second.novelty.unknown_tokens, third.novelty.is_unreadable) == (3, 1, True)
    assert [record.message for record in caplog.records].count("text_unreadable") == 1
    assert "1 of its 3 tokens are words that the model does not know" in " ".join("\n".join(decided_words(second, {})).split())


@pytest.mark.parametrize("text", [" ", "\u200b", "🙂 👍", "[REDACTED]", "<redacted> ({NAME_1}) ***"])
def test_a_text_without_words_repeats_no_other_but_its_copy(openvino: Embedder, text: str) -> None:
    for embedder in (openvino, load_embedder(embedder="words")):
        *_, wordless, copy = decided_by(embedder, "book a flight", "…", text, text)
        assert (wordless.novelty.source, wordless.dimensions.novelty, wordless.outcome) == ("unreadable", 0.5, "accepted")
        assert (copy.novelty.duplicate_of, copy.dimensions.novelty) == ("kp:trace:2", 0)


def test_traces_that_share_what_is_read_are_explained(openvino: Embedder) -> None:
    _, second = decided_by(openvino, "tree " * 600, "tree " * 600 + "forest")
    explained = " ".join("\n".join(decided_words(second, {})).split())
    assert "both have the same 512 tokens, and what else they say is not read" in explained
