"""Any sentence-transformers model gives the vectors of sentence-transformers' own ``encode``, on every engine.

All tests that import torch are in this file, because each process of the suite that imports it spends some ten seconds.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from kp_scorer import Scorer
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding import openvino_engine
from kp_scorer.embedding.bert_graph import build, openvino
from kp_scorer.embedding.embedder import RECIPES, TRACE, Embedder, Ids, Vectors
from kp_scorer.embedding.model import ModelFiles, find_model
from kp_scorer.embedding.openvino_engine import OpenVinoEmbedder
from kp_scorer.errors import EngineUnavailable, InvalidTrace, SettingsError
from kp_scorer.limits import Limits
from kp_scorer.settings import load_settings

from tests.support.builders import load_embedder, minimal_payload
from tests.support.commands import command
from tests.support.json_values import change_json
from tests.support.required import require_torch
from tests.support.traces import sample_traces

# Importing torch takes seconds, which every process of the suite would spend when it collects tests.
if TYPE_CHECKING:
    from kp_scorer.embedding.packed import PackedPasses
    from sentence_transformers import SentenceTransformer

pytestmark = pytest.mark.slow

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
        # Encode texts one by one, because padding changes the last digits.
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
    # The texts must have different vectors, or it would prove nothing that both libraries agree.
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


# One model takes fewer tokens than the recipe allows, the other takes more.
@pytest.mark.parametrize("tiny", ["mpnet", "gpt2"], indirect=True)
def test_a_recipe_of_two_parts_takes_no_more_than_the_model(tiny: Tiny) -> None:
    embedder = load_embedder("asked_and_did", embedder="torch", model=str(tiny.directory))
    (tokenized,) = embedder.tokenize_all(["tree " * 2_000 + "\x1e" + "river " * 2_000])
    parts = RECIPES["asked_and_did"].parts
    assert tokenized.tokens == sum(min(part.max_tokens or 0, files(tiny).max_tokens) for part in parts)


def test_openvino_runs_models_of_berts_family_and_torch_the_others(tiny: Tiny) -> None:
    selected, expected = load_embedder(model=str(tiny.directory)), tiny.encode(TEXTS)
    if tiny.directory.name not in OF_BERT:
        assert selected.engine.startswith("torch")
        return
    assert selected.engine.startswith("openvino")
    # A processor with bfloat16 computes with only three decimal digits.
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
    tiny: Tiny, tmp_path: Path, file: str, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(tiny.directory, tmp_path / "copy")
    change_json(copy / file, **change)
    with pytest.raises(SettingsError, match=r"openvino cannot be used: openvino (runs|pools)"):
        load_embedder(embedder="openvino", model=str(copy))
    # No other engine is used instead, so the error says all.
    assert caplog.records == []


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
    # Simulate a type of model whose positions begin at 2, although the package does not know that.
    monkeypatch.setattr("kp_scorer.embedding.model.OFFSET_POSITIONS", ())
    with pytest.raises(SettingsError, match=r"^embedding\.model: .* cannot embed the 130 tokens that it says it takes"):
        load_embedder(embedder="torch", model=str(copy))


@pytest.fixture
def partly_broken(tiny: Tiny, tmp_path: Path) -> Path:
    """The same model, in which the embedding of the word "castle" is not a number."""
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
def test_how_new_refuses_a_text_without_a_vector(partly_broken: Path) -> None:
    scorer = Scorer(load_settings({"embedding.embedder": "torch", "embedding.model": str(partly_broken)}))
    with pytest.raises(InvalidTrace, match="expected a text that the embedder has a vector for"):
        scorer.how_new("a castle")
    assert scorer.how_new("a tree") == 0.5


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_a_model_that_needs_code_of_its_own_is_refused_for_that(tiny: Tiny, tmp_path: Path) -> None:
    copy = tiny._replace(directory=shutil.copytree(tiny.directory, tmp_path / "copy"))
    (copy.directory / "own.py").write_text("raise AssertionError('this must not run')", "utf-8")
    change_json(copy.directory / "config.json", model_type="own", auto_map={"AutoModel": "own.Own", "AutoConfig": "own.Config"})
    with pytest.raises(SettingsError, match=r"^embedding\.model: .* needs code of its own \(trust_remote_code\)"):
        on_torch(copy)


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_a_gpu_that_torch_does_not_see_is_logged(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    monkeypatch.setattr("kp_scorer.embedding.select._GPU_DEVICES", ("null",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert on_torch(tiny).engine.startswith("torch f32")
    assert [(record.msg, vars(record)["detail"]) for record in caplog.records] == [("engine_unavailable", "torch sees no GPU")]


def default_model(engine: str) -> Embedder:
    with pytest.MonkeyPatch.context() as patch:
        if engine != "torch_on_gpu":
            patch.setattr("kp_scorer.embedding.select._GPU_DEVICES", ())
        elif not has_gpu():
            pytest.skip("there is no GPU that torch can use")
        return load_embedder(embedder=engine.partition("_")[0])


def has_gpu() -> bool:
    require_torch()
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture(scope="module")
def torch_on_cpu() -> Embedder:
    require_torch()
    return default_model("torch_on_cpu")


@pytest.fixture(scope="module", params=["openvino", "torch_on_gpu"])
def compared(request: pytest.FixtureRequest) -> Embedder:
    """The engine to compare with torch on the CPU."""
    return default_model(request.param)


def test_vectors_are_those_of_every_other_engine(compared: Embedder, torch_on_cpu: Embedder) -> None:
    of_samples = [decode_trace(trace, Limits()).embedding_text for trace in sample_traces()[::4]]
    just_below_a_full_one = ["tree river castle " * 4 + "tree " * count for count in (1, 2, 480, 497, 498, 499)]
    for texts in (of_samples, just_below_a_full_one):
        cosines = (compared.embed(texts) * torch_on_cpu.embed(texts)).sum(axis=1)
        assert cosines.min() > 1 - 1e-4
    assert compared.space == torch_on_cpu.space
    assert compared.dimensions == torch_on_cpu.dimensions


def test_texts_get_the_same_unit_vectors_together_and_alone(compared: Embedder, torch_on_cpu: Embedder) -> None:
    texts = ["", "a", "e\u0301 \u96e8 \u2603", "refund a double charge"]
    texts += ["tree " * 30, "tree " * 31, "river " * 200, "b " * 2_000]
    for embedder in (compared, torch_on_cpu):
        together = embedder.embed(texts)
        assert together.shape == (len(texts), embedder.dimensions)
        assert together.dtype == np.float32
        assert np.allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
        alone = np.concatenate([embedder.embed([text]) for text in texts])
        # The tolerance is half the digits of single precision, or of half precision where sums are done in another order.
        tolerance = 1e-5 if "f32" in embedder.engine else 2e-3
        assert np.abs(together - alone).max() < tolerance
        assert embedder.embed([]).shape == (0, embedder.dimensions)


def test_the_graph_gives_the_vectors_of_sentence_transformers() -> None:
    require_torch()
    import torch
    from kp_scorer.embedding.torch_engine import load_model, unit_vectors

    default = find_model("")
    assert default
    model = load_model(default.path, default.tokenizer, default.max_tokens, "cpu")
    with torch.no_grad():
        for weights in model.parameters():
            # The weights of the graph have half precision, too.
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
    """Streams that give another vector for the last of several texts, as real ones once did for the whole life of a process."""

    def run(self, inputs: Sequence[Any]) -> list[Vectors]:
        selected = super().run(inputs)
        return [*selected[:-1], selected[-1][:, ::-1]] if len(selected) > 1 else selected


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_streams_that_give_one_text_two_vectors_are_compiled_anew(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = openvino_engine._Streams
    made: list[int] = []

    def wrong_at_first(core: Any, model: Any, streams: int) -> openvino_engine._Streams:
        made.append(streams)
        return (WrongSideBySide if len(made) <= 4 else right)(core, model, streams)

    texts = ["tree " * count for count in (1, 2, 2, 30, 50, 200, 200)]
    on_one_thread = OpenVinoEmbedder(files(tiny), TRACE, 1).embed(texts)
    monkeypatch.setattr(openvino_engine, "_Streams", wrong_at_first)
    selected = OpenVinoEmbedder(files(tiny), TRACE, 3)
    assert made == [1, 1, 3, 3] * 2
    assert [record.msg for record in caplog.records] == ["streams_disagree"]
    assert np.abs(selected.embed(texts) - on_one_thread).max() < 2e-3


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_an_engine_that_gives_one_text_two_vectors_is_not_used(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_engine, "_Streams", WrongSideBySide)
    monkeypatch.setattr(openvino_engine, "_TRIES", 1)
    with pytest.raises(EngineUnavailable, match="openvino gives different vectors for one text"):
        OpenVinoEmbedder(files(tiny), TRACE, 2)


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


# One of the models whose passes can be packed pools by the mean, the other by the first token.
of_packed_models = pytest.mark.parametrize("tiny", OF_BERT, indirect=True)


@of_packed_models
def test_texts_of_any_length_in_one_pass_get_their_own_vectors(tiny: Tiny) -> None:
    passes = packed(tiny.model)
    assert passes
    pad_id = int(tiny.model.tokenizer.pad_token_id)
    rows = [[0, 9, 8, 2], [5], [0, 7, pad_id, pad_id, 30, 2], list(range(100)), [0, pad_id]]
    assert np.abs(passes.run(rows) - padded_vectors(tiny.model, rows)).max() < 1e-4


@of_packed_models
def test_a_model_whose_packed_vectors_would_differ_runs_padded(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from kp_scorer.embedding.packed import PackedModel

    def all_first(_: PackedModel, ids: torch.Tensor, *__: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(ids)

    monkeypatch.setattr(PackedModel, "_positions", all_first)
    assert packed(tiny.model) is None
    assert caplog.messages == ["model_not_packed"]


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
def test_a_pass_that_finds_no_memory_becomes_smaller_ones(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from kp_scorer.embedding.torch_engine import TorchEmbedder

    embedder = TorchEmbedder(files(tiny), TRACE, 1, "cpu")
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
