"""Converted models: in a cache, made once, whole or not at all, and all that a worker needs of torch; on streams that agree."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kp_scorer.embedding import bert_graph, openvino_engine
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.select import select_embedder
from kp_scorer.errors import ModelUnconverted, SettingsError
from kp_scorer.settings.sections import EmbeddingSettings

from tests.support.builders import load_embedder
from tests.support.required import require_torch

TEXTS = ["refund a double charge", "tree " * 600]
ANOTHER_USER = 12_345
FILES = {"model.xml", "model.bin", "digests.json"}
HEAVY = ("torch", "transformers", "sentence_transformers")
LOAD_AND_TELL = f"""
import json, sys
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.select import select_embedder
from kp_scorer.settings.sections import EmbeddingSettings
embedder = select_embedder(EmbeddingSettings(model=sys.argv[1]))
vectors = embedder and embedder.embed({TEXTS!r}).tolist()
print(json.dumps({{"engine": embedder and embedder.engine, "vectors": vectors, "imported": list(sys.modules)}}))
"""


def start(small: EmbeddingSettings) -> "subprocess.Popen[str]":
    """Load the embedder in a process of its own, which tells what it found."""
    return subprocess.Popen([sys.executable, "-c", LOAD_AND_TELL, small.model], stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingSettings:
    """Settings with a model that is converted in a moment."""
    require_torch()
    # It imports torch, which takes seconds, in every process that collects this file.
    from tests.support.tiny_models import save_tiny

    directory = tmp_path_factory.mktemp("small")
    save_tiny("bert", directory)
    return EmbeddingSettings(embedder="openvino", model=str(directory / "bert"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def expected(small: EmbeddingSettings, cache: Path) -> Vectors:
    """Return the vectors of the texts by that model, once it is converted into the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        selected = select_embedder(small)
    assert selected
    return selected.embed(TEXTS)


@pytest.fixture
def own_cache(expected: Vectors, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cache, to be damaged; the directory of its one model."""
    shutil.copytree(cache / "kp-scorer", tmp_path / "kp-scorer")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (place,) = models(tmp_path / "kp-scorer")
    return place


@pytest.fixture
def no_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch: what is not in the cache cannot be had."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Files are made for all to write, as some users have it."""
    before = os.umask(0)
    yield
    os.umask(before)


def cache_events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, Path]]:
    return [(record.message, Path(vars(record)["directory"])) for record in caplog.records if "directory" in vars(record)]


def models(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def result_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    with process:
        output, _ = process.communicate(timeout=300)
    # Without a logging set-up, warnings go to the same stream.
    loaded: dict[str, Any] = json.loads(output.splitlines()[-1])
    return loaded


@pytest.mark.slow
def test_workers_that_start_at_a_damaged_model_convert_it_once_and_import_no_torch(
    small: EmbeddingSettings, own_cache: Path, expected: Vectors, open_umask: None
) -> None:
    weights = own_cache / "model.bin"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 64
    weights.write_bytes(content)
    # Of a conversion that was killed.
    shutil.copytree(own_cache, own_cache.parent / f"new-{own_cache.name}-left" / own_cache.name)
    at_once = [start(small), start(small)]
    for loaded in [result_of(process) for process in at_once]:
        assert loaded["engine"].startswith("openvino")
        assert np.array_equal(np.array(loaded["vectors"], np.float32), expected)
        assert not set(HEAVY) & set(loaded["imported"])
    assert models(own_cache.parent) == [own_cache]
    assert {file.name for file in own_cache.iterdir()} == FILES
    assert not any(path.stat().st_mode & 0o022 for path in (own_cache, *own_cache.iterdir()))


@pytest.fixture
def torch_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every process that a test starts."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("torch_is_missing")
def test_the_default_model_is_converted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_embedder(embedder="openvino").embed(TEXTS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = result_of(start(EmbeddingSettings()))
    assert loaded["engine"].startswith("openvino")
    assert np.array_equal(np.array(loaded["vectors"], np.float32), expected)
    assert {file.name for file in models(tmp_path / "cache" / "kp-scorer")[0].iterdir()} == FILES


@pytest.mark.slow
def test_the_default_models_graph_gives_the_vectors_of_its_conversion_by_torch(tmp_path: Path) -> None:
    require_torch()
    from kp_scorer.embedding.torch_engine import convert

    default = find_model("")
    assert default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(default.path, default.tokenizer, default.max_tokens, tmp_path / "by_torch.xml")
    openvino_engine.openvino.save_model(bert_graph.build(default.path), tmp_path / "built.xml", compress_to_fp16=True)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    by_torch, built = (
        openvino_engine.openvino.compile_model(tmp_path / f"{name}.xml", "CPU", exact) for name in ("by_torch", "built")
    )
    for texts, length in ((1, 1), (1, 512), (2, 200), (4, 96)):
        ids = np.arange(1_000, 1_000 + texts * length).reshape(texts, length)
        mask = np.ones_like(ids)
        mask[0, length - length // 3 :] = 0
        assert np.abs(built([ids, mask])[0] - by_torch([ids, mask])[0]).max() < 1e-5


@pytest.mark.usefixtures("torch_is_missing")
def test_a_model_in_the_cache_needs_no_torch_and_its_folder_is_closed_to_others(
    small: EmbeddingSettings, own_cache: Path, expected: Vectors
) -> None:
    # Others can write to the folder that has it: that is changed at the start.
    own_cache.parent.chmod(0o777)
    loaded = result_of(start(small))
    assert loaded["engine"].startswith("openvino")
    assert np.array_equal(np.array(loaded["vectors"], np.float32), expected)
    assert own_cache.parent.stat().st_mode & 0o777 == 0o755
    # Nor does it write another thing, so the cache may be part of a read-only image.
    assert {file.name for file in own_cache.iterdir()} == FILES
    shutil.rmtree(own_cache)
    assert result_of(start(small))["engine"] is None


def test_without_conversion_only_an_intact_model_is_loaded_and_nothing_is_written(
    small: EmbeddingSettings, own_cache: Path, expected: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected = select_embedder(small, converts=False)
    assert selected
    assert np.array_equal(selected.embed(TEXTS), expected)
    (own_cache / "model.bin").write_bytes(b"damaged")
    with pytest.raises(ModelUnconverted):
        select_embedder(small, converts=False)
    assert (own_cache / "model.bin").read_bytes() == b"damaged"
    shutil.rmtree(own_cache.parent)
    with pytest.raises(ModelUnconverted):
        select_embedder(small, converts=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SettingsError, match="needed to convert the model"):
        select_embedder(small, converts=False)
    assert not own_cache.parent.exists()


def writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def anothers(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, ANOTHER_USER, ANOTHER_USER)


@pytest.mark.parametrize(
    ("name", "change", "event"),
    [
        *((name, writable, "model_converted_again") for name in (".", "model.bin", "digests.json")),
        *((name, anothers, "model_converted_again") for name in (".", "model.bin")),
        ("..", anothers, "model_cache_ignored"),
    ],
)
@pytest.mark.usefixtures("no_converter")
def test_a_model_that_others_could_write_is_not_used(
    small: EmbeddingSettings,
    own_cache: Path,
    name: str,
    change: Callable[[Path], None],
    event: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change(own_cache / name)
    with pytest.raises(SettingsError, match="needed to convert the model"):
        select_embedder(small)
    assert cache_events(caplog) == [(event, own_cache.parent if name == ".." else own_cache)]
    assert {path.name for path in own_cache.iterdir()} == FILES


class WrongSideBySide(openvino_engine._Streams):  # nothing else makes passes side by side wrong
    """Streams that give another vector for the last of several texts, as they once did for a process's whole life."""

    def run(self, inputs: Sequence[Any]) -> list[Vectors]:
        selected = super().run(inputs)
        return [*selected[:-1], selected[-1][:, ::-1]] if len(selected) > 1 else selected


@pytest.mark.usefixtures("own_cache")
def test_streams_that_give_one_text_two_vectors_are_compiled_anew(
    small: EmbeddingSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = openvino_engine._Streams
    made: list[int] = []

    def wrong_at_first(core: Any, model: Any, streams: int) -> openvino_engine._Streams:
        made.append(streams)
        return (WrongSideBySide if len(made) <= 4 else right)(core, model, streams)

    texts = ["tree " * count for count in (1, 2, 2, 30, 50, 200, 200)]
    on_one_thread = load_embedder(embedder="openvino", model=small.model, threads=1).embed(texts)
    monkeypatch.setattr(openvino_engine, "_Streams", wrong_at_first)
    selected = load_embedder(embedder="openvino", model=small.model, threads=3)
    assert made == [1, 1, 3, 3] * 2
    assert [record.msg for record in caplog.records] == ["streams_disagree"]
    assert np.abs(selected.embed(texts) - on_one_thread).max() < 2e-3


@pytest.mark.usefixtures("own_cache")
def test_an_engine_that_gives_one_text_two_vectors_is_not_used(
    small: EmbeddingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_engine, "_Streams", WrongSideBySide)
    monkeypatch.setattr(openvino_engine, "_TRIES", 1)
    with pytest.raises(SettingsError, match="openvino gives different vectors for one text"):
        load_embedder(embedder="openvino", model=small.model, threads=2)
    assert load_embedder(model=small.model, threads=2).engine.startswith("torch")
