"""Packed passes give the vectors of padded ones, or padded ones are made."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from kp_scorer.embedding.embedder import TRACE, Ids, Vectors
from kp_scorer.embedding.model import find_model

from tests.support.required import require_torch

# Importing torch takes seconds, which every process of the suite would spend, as it collects all tests.
if TYPE_CHECKING:
    from kp_scorer.embedding.packed import PackedPasses
    from kp_scorer.embedding.torch_engine import TorchEmbedder
    from sentence_transformers import SentenceTransformer

MODELS = {"bert": "mean", "roberta": "cls"}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "SentenceTransformer":
    require_torch()
    from sentence_transformers.sentence_transformer.modules import Pooling

    from tests.support.tiny_models import save_tiny

    model = save_tiny(request.param, tmp_path_factory.mktemp("packed"))
    model[1] = Pooling(32, MODELS[request.param])
    return model


def packed(model: "SentenceTransformer") -> "PackedPasses | None":
    import torch
    from kp_scorer.embedding.torch_engine import packed_passes

    return packed_passes(model, torch.device("cpu"), 4_096, 100)


def padded_vectors(model: "SentenceTransformer", rows: list[Ids]) -> Vectors:
    import torch
    from kp_scorer.embedding.torch_engine import unit_vectors

    ids = [torch.tensor([row]) for row in rows]
    with torch.inference_mode():
        return np.concatenate([unit_vectors(model, each, torch.ones_like(each)) for each in ids])


def test_texts_of_any_length_in_one_pass_get_their_own_vectors(model: "SentenceTransformer") -> None:
    passes = packed(model)
    assert passes
    pad_id = int(model.tokenizer.pad_token_id)
    rows = [[0, 9, 8, 2], [5], [0, 7, pad_id, pad_id, 30, 2], list(range(100)), [0, pad_id]]
    assert np.abs(passes.run(rows) - padded_vectors(model, rows)).max() < 1e-4


def test_a_model_whose_packed_vectors_would_differ_runs_padded(
    model: "SentenceTransformer", monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from kp_scorer.embedding.packed import PackedModel

    def all_first(_: PackedModel, ids: torch.Tensor, *__: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(ids)

    monkeypatch.setattr(PackedModel, "_positions", all_first)
    assert packed(model) is None
    assert caplog.messages == ["model_not_packed"]


@pytest.fixture
def embedder(tmp_path: Path) -> "TorchEmbedder":
    require_torch()
    from kp_scorer.embedding.torch_engine import TorchEmbedder

    from tests.support.tiny_models import save_tiny

    save_tiny("bert", tmp_path)
    files = find_model(str(tmp_path / "bert"))
    assert files
    return TorchEmbedder(files, TRACE, 1, "cpu")


def test_a_pass_that_finds_no_memory_becomes_smaller_ones(embedder: "TorchEmbedder", monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    run_pass, passes, most = embedder.run_pass, [], embedder.max_tokens
    run = embedder._vectors

    def scarce(group: list[Ids]) -> Vectors:
        passes.append(len(group))
        if len(group) > 2:
            raise torch.OutOfMemoryError
        return run(group)

    rows = [[1, 9, 2], [1, 7, 8, 2], [1, 2], [1, 30, 2], [1, 31, 31, 2]]
    expected = run_pass(rows, together=True)
    monkeypatch.setattr(embedder, "_vectors", scarce)
    assert np.abs(embedder.run_pass(rows, together=True) - expected).max() < 1e-5
    assert passes == [5, 2, 3, 1, 2]
    assert embedder.max_tokens < most
