"""OpenVINO runs the default model from its weights alone, without torch, on streams that agree."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kp_scorer.embedding import openvino_engine
from kp_scorer.embedding.bert_graph import build, openvino
from kp_scorer.embedding.embedder import TRACE, Vectors
from kp_scorer.embedding.model import ModelFiles, find_model
from kp_scorer.embedding.openvino_engine import OpenVinoEmbedder
from kp_scorer.errors import EngineUnavailable

from tests.support.builders import load_embedder
from tests.support.required import require_torch

TEXTS = ["refund a double charge", "tree " * 600]
HEAVY = ("torch", "transformers", "sentence_transformers")
LOAD_AND_TELL = f"""
import json, sys
from kp_scorer.embedding.select import select_embedder
from kp_scorer.settings.sections import EmbeddingSettings
embedder = select_embedder(EmbeddingSettings())
vectors = embedder and embedder.embed({TEXTS!r}).tolist()
print(json.dumps({{"engine": embedder and embedder.engine, "vectors": vectors}}))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model that is compiled in a moment."""
    require_torch()
    # It imports torch, which takes seconds, in every process that collects this file.
    from tests.support.tiny_models import save_tiny

    directory = tmp_path_factory.mktemp("small")
    save_tiny("bert", directory)
    model = find_model(str(directory / "bert"))
    assert model
    return model


def test_the_default_model_needs_no_torch_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))")
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    done = subprocess.run([sys.executable, "-B", "-c", LOAD_AND_TELL], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded["engine"].startswith("openvino")
    assert np.array_equal(np.array(loaded["vectors"], np.float32), load_embedder(embedder="openvino").embed(TEXTS))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["sitecustomize.py"]


@pytest.mark.slow
def test_the_graph_gives_the_vectors_of_sentence_transformers() -> None:
    require_torch()
    import torch
    from kp_scorer.embedding.torch_engine import load_model, unit_vectors

    default = find_model("")
    assert default
    model = load_model(default.path, default.tokenizer, default.max_tokens, "cpu")
    with torch.no_grad():
        for weights in model.parameters():
            # As the graph's are.
            weights.copy_(weights.half())
    built = openvino.compile_model(build(default), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for texts, length in ((1, 1), (1, 512), (2, 200), (4, 96)):
        ids = np.arange(1_000, 1_000 + texts * length).reshape(texts, length)
        mask = np.ones_like(ids)
        mask[0, length - length // 3 :] = 0
        with torch.inference_mode():
            expected = unit_vectors(model, torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
        assert np.abs(built([ids, mask])[0] - expected).max() < 1e-5


class WrongSideBySide(openvino_engine._Streams):  # nothing else makes passes side by side wrong
    """Streams that give another vector for the last of several texts, as they once did for a process's whole life."""

    def run(self, inputs: Sequence[Any]) -> list[Vectors]:
        selected = super().run(inputs)
        return [*selected[:-1], selected[-1][:, ::-1]] if len(selected) > 1 else selected


def test_streams_that_give_one_text_two_vectors_are_compiled_anew(
    small: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = openvino_engine._Streams
    made: list[int] = []

    def wrong_at_first(core: Any, model: Any, streams: int) -> openvino_engine._Streams:
        made.append(streams)
        return (WrongSideBySide if len(made) <= 4 else right)(core, model, streams)

    texts = ["tree " * count for count in (1, 2, 2, 30, 50, 200, 200)]
    on_one_thread = OpenVinoEmbedder(small, TRACE, 1).embed(texts)
    monkeypatch.setattr(openvino_engine, "_Streams", wrong_at_first)
    selected = OpenVinoEmbedder(small, TRACE, 3)
    assert made == [1, 1, 3, 3] * 2
    assert [record.msg for record in caplog.records] == ["streams_disagree"]
    assert np.abs(selected.embed(texts) - on_one_thread).max() < 2e-3


def test_an_engine_that_gives_one_text_two_vectors_is_not_used(small: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_engine, "_Streams", WrongSideBySide)
    monkeypatch.setattr(openvino_engine, "_TRIES", 1)
    with pytest.raises(EngineUnavailable, match="openvino gives different vectors for one text"):
        OpenVinoEmbedder(small, TRACE, 2)
