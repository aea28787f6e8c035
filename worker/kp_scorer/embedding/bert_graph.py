"""The graph of a model of BERT's family for OpenVINO, built from its weights with OpenVINO's own operations."""

import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kp_scorer.embedding.model import BERT_FAMILY, OFFSET_POSITIONS, ModelFiles, read_json
from kp_scorer.errors import EngineUnavailable

# Import OpenVINO without its reports to its makers; all other modules import it from here. An ordinary import would look up an
# analytics host, send a message there and leave files in the home directory. Without the package that does this, OpenVINO
# uses a stand-in that does nothing. So make that package seem missing while OpenVINO is imported, and only then: this changes
# neither the environment of the process nor anyone's consent.
_REPORTER: Final = "openvino_telemetry"
_modules: dict[str, Any] = sys.modules
_reporter_before = _modules.get(_REPORTER)
# Python treats a module that is None as missing.
_modules[_REPORTER] = None
try:
    import openvino as openvino  # noqa: TID251  # the one place; others import it from here
    from openvino._offline_transformations import compress_model_transformation  # noqa: TID251
finally:
    del _modules[_REPORTER]
    if _reporter_before is not None:
        _modules[_REPORTER] = _reporter_before

_HEADER_BYTES: Final = 8  # The header is preceded by its length in this many bytes.
_MASKED: Final = 1e4  # Subtracted from the attention scores of padding, so that it gets a share of exactly 0.
_LEAST_TOKENS: Final = 1e-9
_LEAST_NORM: Final = 1e-12
_NEEDED: Final = {"hidden_size", "layer_norm_eps", "num_attention_heads", "num_hidden_layers", "pad_token_id"}
_TYPES: Final[dict[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_POOLINGS: Final = {"mean": "mean", "cls": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}

_ops: Final[Any] = openvino.opset13


def build(model: ModelFiles) -> Any:
    """Build the graph of an encoder of BERT's family with mean pooling, or the first token's vector, and normalisation.

    Its inputs are ids and mask, int64 of shape (texts, tokens), its output float32 unit vectors of shape (texts, dimensions).
    Weights are rounded to float16. Raises EngineUnavailable if the model's files describe anything else.
    """
    pooling, encoder = _pooling(model.path), _Encoder(model.tokenizer.parent)
    ids, mask = (_ops.parameter([-1, -1], np.int64, name) for name in ("ids", "mask"))
    present = _ops.convert(mask, "f32")
    # The mask has one value for each key. With one for each query and key, it would be as large as the attention itself.
    masked = _ops.unsqueeze(_ops.multiply(_ops.subtract(present, _float(1)), _float(_MASKED)), _integers(1, 2))
    hidden = encoder.embeddings(ids)
    for layer in range(encoder.layers):
        hidden = encoder.layer(hidden, masked, f"encoder.layer.{layer}")
    if pooling == "mean":
        weights = _ops.unsqueeze(present, _integers(2))
        tokens = _ops.maximum(_ops.reduce_sum(weights, _integers(1)), _float(_LEAST_TOKENS))
        pooled = _ops.divide(_ops.reduce_sum(_ops.multiply(hidden, weights), _integers(1)), tokens)
    else:
        pooled = _ops.gather(hidden, _integer(0), _integer(1))
    graph = openvino.Model([_ops.normalize_l2(pooled, _integers(1), _LEAST_NORM, "max")], [ids, mask], "bert")
    # OpenVINO 2026.4.1 does this publicly only where it writes a graph to a file. It halves the memory of the weights.
    compress_model_transformation(graph)
    return graph


def _pooling(directory: Path) -> str:
    """Return the pooling of a sentence-transformers model; raise EngineUnavailable if it is neither mean nor first token."""
    modules: Any = read_json(directory / "modules.json")
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise EngineUnavailable(f"openvino runs no model with the modules {', '.join(kinds)}")
    config: Any = read_json(directory / modules[1]["path"] / "config.json", {})
    # Earlier versions of sentence-transformers wrote a flag for each mode.
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = [config["pooling_mode"]] if "pooling_mode" in config else flags
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise EngineUnavailable("openvino pools only by the mean or the first token")
    return _POOLINGS[modes[0]]


def _config(directory: Path) -> dict[str, Any]:
    """Read the configuration of an encoder; raise EngineUnavailable if this module cannot build its graph."""
    config: dict[str, Any] = read_json(directory / "config.json")
    lowers = [file for file in directory.glob("sentence_*_config.json") if read_json(file).get("do_lower_case")]
    is_absolute = config.get("position_embedding_type", "absolute") == "absolute"
    is_plain = config.get("hidden_act") == "gelu" and is_absolute and not config.get("is_decoder") and not lowers
    is_known = config.get("model_type") in BERT_FAMILY and config.keys() >= _NEEDED
    if not (is_known and is_plain and (directory / "model.safetensors").is_file()):
        raise EngineUnavailable("openvino runs only models of BERT's family, in one safetensors file")
    return config


class _Encoder:
    """Builds the parts of a BERT encoder as graphs, whose weights it reads by their names."""

    def __init__(self, directory: Path) -> None:
        config = _config(directory)
        self._tensors = _read_tensors(directory / "model.safetensors")
        self._size = int(config["hidden_size"])
        self._heads = int(config["num_attention_heads"])
        self._epsilon = float(config["layer_norm_eps"])
        self.layers = int(config["num_hidden_layers"])
        # Such models count positions from one above the padding token's id, and leave that token out.
        self._padding_id = int(config["pad_token_id"]) if config["model_type"] in OFFSET_POSITIONS else None

    def embeddings(self, ids: Any) -> Any:
        positions = self._positions(ids)
        words = _ops.gather(self._weight("embeddings.word_embeddings.weight"), ids, _integer(0))
        places = _ops.gather(self._weight("embeddings.position_embeddings.weight"), positions, _integer(0))
        # All tokens are of the first type.
        kind = _float(self._tensor("embeddings.token_type_embeddings.weight")[:1])
        return self._norm(_ops.add(_ops.add(words, kind), places), "embeddings.LayerNorm")

    def _positions(self, ids: Any) -> Any:
        if self._padding_id is None:
            length = _ops.squeeze(_ops.gather(_ops.shape_of(ids), _integers(1), _integer(0)), _integers(0))
            return _ops.range(_integer(0), length, _integer(1), "i64")
        counted = _ops.convert(_ops.not_equal(ids, _integer(self._padding_id)), "i64")
        return _ops.add(_ops.multiply(_ops.cum_sum(counted, _integer(1)), counted), _integer(self._padding_id))

    def layer(self, hidden: Any, masked: Any, name: str) -> Any:
        attended = self._linear(self._attention(hidden, masked, f"{name}.attention.self"), f"{name}.attention.output.dense")
        hidden = self._norm(_ops.add(attended, hidden), f"{name}.attention.output.LayerNorm")
        widened = _ops.gelu(self._linear(hidden, f"{name}.intermediate.dense"), "erf")
        return self._norm(_ops.add(self._linear(widened, f"{name}.output.dense"), hidden), f"{name}.output.LayerNorm")

    def _attention(self, hidden: Any, masked: Any, name: str) -> Any:
        split = _integers(0, 0, self._heads, self._size // self._heads)
        swap = _integers(0, 2, 1, 3)
        parts = (self._linear(hidden, f"{name}.{part}") for part in ("query", "key", "value"))
        by_head = [_ops.transpose(_ops.reshape(part, split, True), swap) for part in parts]
        attended = _ops.transpose(_ops.scaled_dot_product_attention(*by_head, masked), swap)
        return _ops.reshape(attended, _integers(0, 0, self._size), True)

    def _linear(self, hidden: Any, name: str) -> Any:
        return _ops.add(_ops.matmul(hidden, self._weight(f"{name}.weight"), False, True), self._weight(f"{name}.bias"))

    def _norm(self, hidden: Any, name: str) -> Any:
        normal = _ops.mvn(hidden, _integers(-1), True, self._epsilon, "inside_sqrt")
        return _ops.add(_ops.multiply(normal, self._weight(f"{name}.weight")), self._weight(f"{name}.bias"))

    def _weight(self, name: str) -> Any:
        return _float(self._tensor(name))

    def _tensor(self, name: str) -> NDArray[np.float32]:
        tensor = self._tensors.get(name)
        # In float16, an infinite weight would become 65,504, its largest number.
        if tensor is None or not np.isfinite(tensor).all():
            raise EngineUnavailable(f"openvino expects {name}, of finite numbers in single or half precision")
        return tensor


def _read_tensors(file: Path) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a safetensors file, whose header in JSON says where each of them lies."""
    content = np.memmap(file, np.uint8, "r")
    start = _HEADER_BYTES + int.from_bytes(content[:_HEADER_BYTES].tobytes(), "little")
    header = json.loads(content[_HEADER_BYTES:start].tobytes())
    tensors = {}
    for name, described in header.items():
        if kind := _TYPES.get(described.get("dtype")):
            first, end = (start + offset for offset in described["data_offsets"])
            # A model that was saved with a head has a prefix before these names.
            start_of_name = max(0, name.find("embeddings."), name.find("encoder."))
            tensors[name[start_of_name:]] = content[first:end].view(kind).reshape(described["shape"])
    return tensors


def _float(values: float | NDArray[np.float32]) -> Any:
    return _ops.constant(np.asarray(values, np.float32))


def _integer(value: int) -> Any:
    return _ops.constant(np.asarray(value, np.int64))


def _integers(*values: int) -> Any:
    return _ops.constant(np.asarray(values, np.int64))
