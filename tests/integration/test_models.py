"""Any sentence-transformers model gives the vectors that sentence-transformers' own ``encode`` gives."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from kp_scorer.embedding.embedder import RECIPES, Embedder, Vectors
from kp_scorer.embedding.model import ModelFiles, find_model
from kp_scorer.errors import SettingsError
from kp_scorer.settings import load_settings

from tests.support.builders import load_embedder, minimal_payload
from tests.support.commands import command
from tests.support.json_files import change_json
from tests.support.required import require_torch

# Importing torch takes seconds, which every process of the suite would spend, as it collects all tests.
if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

TEXTS = [
    "refund a double charge",
    "",
    "rain over the sea! don't",
    "tree river castle " * 20,
    *("tree river castle " * n for n in (400, 500)),
]

OF_BERT = ("bert", "xlm_roberta")


class Tiny(NamedTuple):
    model: "SentenceTransformer"
    directory: Path

    def encode(self, texts: list[str]) -> Vectors:
        # One by one, because padding moves the last digits.
        return np.stack([self.model.encode(text, normalize_embeddings=True) for text in texts])


@pytest.fixture(scope="session", params=["bert", "mpnet", "roberta", "xlm_roberta", "gpt2"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    require_torch()
    from tests.support.tiny_models import save_tiny

    directory = tmp_path_factory.mktemp("tiny")
    return Tiny(save_tiny(request.param, directory), directory / request.param)


def files(tiny: Tiny) -> ModelFiles:
    model = find_model(str(tiny.directory))
    assert model
    return model


def on_torch(tiny: Tiny) -> Embedder:
    return load_embedder(embedder="torch", model=str(tiny.directory))


def test_vectors_are_those_of_sentence_transformers(tiny: Tiny) -> None:
    embedder = on_torch(tiny)
    expected = tiny.encode(TEXTS)
    # Otherwise it would show nothing that they agree.
    assert (expected @ expected.T)[np.triu_indices(4, 1)].max() < 0.99
    for vectors in (embedder.embed(TEXTS), np.concatenate([embedder.embed([text]) for text in TEXTS])):
        assert (vectors * expected).sum(axis=1).min() > 1 - 1e-4
    assert embedder.dimensions == expected.shape[1]
    assert embedder.packs == (tiny.directory.name in OF_BERT)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_a_model_saved_in_half_precision_gets_its_vectors(tiny: Tiny, tmp_path: Path, precision: str) -> None:
    from sentence_transformers import SentenceTransformer

    halved = SentenceTransformer(str(tiny.directory), device="cpu", model_kwargs={"dtype": precision}).eval()
    halved.save(str(tmp_path / "halved"), create_model_card=False)
    vectors = on_torch(Tiny(halved, tmp_path / "halved")).embed(TEXTS)
    expected = np.stack([halved.encode(text, convert_to_tensor=True).float().numpy() for text in TEXTS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert (vectors * expected).sum(axis=1).min() > 1 - 2e-3


def test_a_recipe_of_two_parts_takes_no_more_than_the_model(tiny: Tiny) -> None:
    embedder = load_embedder("asked_and_did", embedder="torch", model=str(tiny.directory))
    tokenized = embedder.tokenize("tree " * 2_000 + "\x1e" + "river " * 2_000)
    parts = RECIPES["asked_and_did"].parts
    assert tokenized.tokens == sum(min(part.max_tokens or 0, files(tiny).max_tokens) for part in parts)


def test_openvino_runs_models_of_berts_family_and_torch_the_others(tiny: Tiny) -> None:
    selected, expected = load_embedder(model=str(tiny.directory)), tiny.encode(TEXTS)
    assert selected.engine.startswith("openvino" if tiny.directory.name in OF_BERT else "torch")
    # A processor with bfloat16 computes with three decimal digits.
    tolerance = 2e-3 if "bf16" in selected.engine else 1e-4
    for vectors in (selected.embed(TEXTS), np.concatenate([selected.embed([text]) for text in TEXTS])):
        assert (vectors * expected).sum(axis=1).min() > 1 - tolerance


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"hidden_act": "relu"}),
        ("config.json", {"position_embedding_type": "relative_key"}),
        ("config.json", {"is_decoder": True}),
        ("sentence_bert_config.json", {"do_lower_case": True}),
        ("1_Pooling/config.json", {"pooling_mode": "max"}),
    ],
)
@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_openvino_refuses_what_its_graph_does_not_have(
    tiny: Tiny, tmp_path: Path, file: str, change: dict[str, object]
) -> None:
    copy = shutil.copytree(tiny.directory, tmp_path / "copy")
    change_json(copy / file, **change)
    with pytest.raises(SettingsError, match=r"openvino cannot be used: openvino (runs|pools)"):
        load_embedder(embedder="openvino", model=str(copy))


@pytest.mark.parametrize("tiny", ["mpnet"], indirect=True)
def test_a_tokenizer_that_sentence_transformers_reads_in_another_way_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    copy = tiny._replace(directory=shutil.copytree(tiny.directory, tmp_path / "copy"))
    change_json(copy.directory / "sentence_bert_config.json", do_lower_case=True)
    normalizer = json.loads((copy.directory / "tokenizer.json").read_text("utf-8"))["normalizer"]
    change_json(copy.directory / "tokenizer.json", normalizer=normalizer | {"lowercase": False})
    with pytest.raises(SettingsError, match=r"tokenizer\.json makes other tokens than sentence-transformers does$"):
        on_torch(copy)


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_a_model_whose_vectors_are_to_be_cut_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    copy = tiny._replace(directory=shutil.copytree(tiny.directory, tmp_path / "copy"))
    change_json(copy.directory / "config_sentence_transformers.json", truncate_dim=16)
    with pytest.raises(SettingsError, match=r"cuts its vectors \(truncate_dim\)"):
        files(copy)


@pytest.mark.parametrize("tiny", ["roberta"], indirect=True)
def test_a_model_that_embeds_fewer_tokens_than_its_files_say_is_refused_at_start(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(tiny.directory, tmp_path / "copy")
    for file, limit in {"sentence_bert_config.json": "max_seq_length", "tokenizer_config.json": "model_max_length"}.items():
        change_json(copy / file, **{limit: 10**30})
    # As if it were of a type that is not known to begin its positions at 2.
    monkeypatch.setattr("kp_scorer.embedding.model.OFFSET_POSITIONS", ())
    with pytest.raises(SettingsError, match=r"^embedding\.model: .* cannot embed the 130 tokens that it says it takes"):
        load_embedder(embedder="torch", model=str(copy))


@pytest.fixture
def partly_broken(tiny: Tiny, tmp_path: Path) -> Path:
    """The same model with a row of its embeddings that is no number, that of one word."""
    import torch
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(str(tiny.directory), device="cpu")
    with torch.no_grad():
        model.transformers_model.embeddings.word_embeddings.weight[model.tokenizer.convert_tokens_to_ids("castle")] = torch.nan
    model.save(str(tmp_path / "broken"), create_model_card=False)
    return tmp_path / "broken"


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_openvino_refuses_weights_that_are_no_numbers(partly_broken: Path) -> None:
    with pytest.raises(SettingsError, match=r"openvino expects embeddings\.word_embeddings\.weight, of finite numbers"):
        load_embedder(embedder="openvino", model=str(partly_broken))


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_a_text_without_a_vector_fails_alone_in_score(partly_broken: Path) -> None:
    objectives = ["a tree", "a castle", "a river"]
    traces = [minimal_payload(trace_id=f"kp:trace:{number}", objective=each) for number, each in enumerate(objectives)]
    settings = load_settings({"embedding.embedder": "torch", "embedding.model": str(partly_broken)})
    done = command(settings, "score", "-", stdin="\n".join(map(json.dumps, traces)))
    assert done.exit_code == 1
    first, failed, last = map(json.loads, done.stdout.splitlines())
    assert (first["trace_id"], last["trace_id"], last["novelty"]["source"]) == ("kp:trace:0", "kp:trace:2", "embedding")
    expected = {"trace_id": "kp:trace:1", "state": "dead", "reason": "scoring_failed", "detail": "FloatingPointError"}
    assert failed == {**expected, "line": 2}
    assert "castle" not in done.stderr


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_a_model_that_needs_code_of_its_own_is_refused_for_that(tiny: Tiny, tmp_path: Path) -> None:
    copy = tiny._replace(directory=shutil.copytree(tiny.directory, tmp_path / "copy"))
    (copy.directory / "own.py").write_text("raise AssertionError('this must not run')", "utf-8")
    change_json(copy.directory / "config.json", model_type="own", auto_map={"AutoModel": "own.Own", "AutoConfig": "own.Config"})
    with pytest.raises(SettingsError, match=r"^embedding\.model: .* needs code of its own \(trust_remote_code\)"):
        on_torch(copy)
