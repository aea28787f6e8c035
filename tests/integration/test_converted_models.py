"""The cache of converted models: made once, whole or not at all, and all that a worker needs of torch."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kp_scorer.embedding.select import select_embedder
from kp_scorer.errors import ModelUnconverted, SettingsError
from kp_scorer.settings.sections import EmbeddingSettings

from tests.support.builders import load_embedder

TEXTS = ["refund a double charge", "tree " * 600]
ANOTHER_USER = 12_345
HEAVY = ("torch", "transformers", "sentence_transformers")
LOAD_AND_TELL = f"""
import json, sys
from kp_scorer.embedding.select import select_embedder
from kp_scorer.settings.sections import EmbeddingSettings
embedder = select_embedder(EmbeddingSettings())
vectors = embedder and embedder.embed({TEXTS!r}).tolist()
print(json.dumps({{"engine": embedder and embedder.engine, "vectors": vectors, "imported": list(sys.modules)}}))
"""


def start() -> "subprocess.Popen[str]":
    """Load the embedder in a process of its own, which tells what it found."""
    return subprocess.Popen([sys.executable, "-c", LOAD_AND_TELL], stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return load_embedder(embedder="openvino").embed(TEXTS)


@pytest.fixture
def own_cache(expected: np.ndarray, model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the session's cache, to be damaged; the directory of its one model."""
    shutil.copytree(model_cache, tmp_path / "kp-scorer")
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
    own_cache: Path, expected: np.ndarray, open_umask: None
) -> None:
    weights = own_cache / "model.bin"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 64
    weights.write_bytes(content)
    # Of a conversion that was killed.
    shutil.copytree(own_cache, own_cache.parent / f"new-{own_cache.name}-left" / own_cache.name)
    at_once = [start(), start()]
    for loaded in [result_of(process) for process in at_once]:
        assert loaded["engine"].startswith("openvino")
        assert np.array_equal(np.array(loaded["vectors"], np.float32), expected)
        assert not set(HEAVY) & set(loaded["imported"])
    assert models(own_cache.parent) == [own_cache]
    assert {file.name for file in own_cache.iterdir()} == {"model.xml", "model.bin", "digests.json"}
    assert not any(path.stat().st_mode & 0o022 for path in (own_cache, *own_cache.iterdir()))


def test_a_model_in_the_cache_needs_no_torch_and_its_folder_is_closed_to_others(
    own_cache: Path, expected: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Others can write to the folder that has it: that is changed at the start.
    own_cache.parent.chmod(0o777)
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loaded = result_of(start())
    assert loaded["engine"].startswith("openvino")
    assert np.array_equal(np.array(loaded["vectors"], np.float32), expected)
    assert own_cache.parent.stat().st_mode & 0o777 == 0o755
    # Nor does it write another thing, so the cache may be part of a read-only image.
    assert {file.name for file in own_cache.iterdir()} == {"model.xml", "model.bin", "digests.json"}
    shutil.rmtree(own_cache)
    assert result_of(start())["engine"] is None


def test_without_conversion_only_an_intact_model_is_loaded_and_nothing_is_written(
    own_cache: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EmbeddingSettings(embedder="openvino")
    selected = select_embedder(settings, converts=False)
    assert selected
    assert np.array_equal(selected.embed(TEXTS), expected)
    (own_cache / "model.bin").write_bytes(b"damaged")
    with pytest.raises(ModelUnconverted):
        select_embedder(settings, converts=False)
    assert (own_cache / "model.bin").read_bytes() == b"damaged"
    shutil.rmtree(own_cache.parent)
    with pytest.raises(ModelUnconverted):
        select_embedder(settings, converts=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SettingsError, match="needed to convert the model"):
        select_embedder(settings, converts=False)
    assert not own_cache.parent.exists()


def writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


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
    own_cache: Path, name: str, change: Callable[[Path], None], event: str, caplog: pytest.LogCaptureFixture
) -> None:
    change(own_cache / name)
    with pytest.raises(SettingsError, match="needed to convert the model"):
        load_embedder(embedder="openvino")
    assert cache_events(caplog) == [(event, own_cache.parent if name == ".." else own_cache)]
    assert {path.name for path in own_cache.iterdir()} == {"model.xml", "model.bin", "digests.json"}
