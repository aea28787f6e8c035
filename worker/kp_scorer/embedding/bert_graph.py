"""The default model's graph for OpenVINO, built from its weights with OpenVINO's own operations.

Other models are converted by tracing them in torch, which takes gigabytes to install; this graph needs OpenVINO alone.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kp_scorer.embedding.openvino_engine import openvino

_HEADER_BYTES: Final = 8  # The header is preceded by its length in this many bytes.
_MASKED: Final = 1e4  # Subtracted from the attention scores of padding, so that it gets a share of exactly 0.
_LEAST_TOKENS: Final = 1e-9
_LEAST_NORM: Final = 1e-12

_ops: Final[Any] = openvino.opset13


def build(directory: Path) -> Any:
    """Build the graph of a BERT encoder with mean pooling and normalisation from its ``config.json`` and ``model.safetensors``.

    Its inputs are ids and mask, int64 of shape (texts, tokens), its output float32 unit vectors of shape (texts, dimensions).
    """
    encoder = _Encoder(directory)
    ids, mask = (_ops.parameter([-1, -1], np.int64, name) for name in ("ids", "mask"))
    present = _ops.convert(mask, "f32")
    # The mask covers the keys alone: over every query and key it would be as large as the attention itself.
    masked = _ops.unsqueeze(_ops.multiply(_ops.subtract(present, _float(1)), _float(_MASKED)), _integers(1, 2))
    hidden = encoder.embeddings(ids)
    for layer in range(encoder.layers):
        hidden = encoder.layer(hidden, masked, f"encoder.layer.{layer}")
    weights = _ops.unsqueeze(present, _integers(2))
    tokens = _ops.maximum(_ops.reduce_sum(weights, _integers(1)), _float(_LEAST_TOKENS))
    mean = _ops.divide(_ops.reduce_sum(_ops.multiply(hidden, weights), _integers(1)), tokens)
    return openvino.Model([_ops.normalize_l2(mean, _integers(1), _LEAST_NORM, "max")], [ids, mask], "bert")


class _Encoder:
    """The parts of a BERT encoder, each a graph whose weights it reads by their names."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text("utf-8"))
        self._tensors = _read_tensors(directory / "model.safetensors")
        self._size = int(config["hidden_size"])
        self._heads = int(config["num_attention_heads"])
        self._epsilon = float(config["layer_norm_eps"])
        self.layers = int(config["num_hidden_layers"])

    def embeddings(self, ids: Any) -> Any:
        length = _ops.squeeze(_ops.gather(_ops.shape_of(ids), _integers(1), _integer(0)), _integers(0))
        positions = _ops.range(_integer(0), length, _integer(1), "i64")
        words = _ops.gather(self._weight("embeddings.word_embeddings.weight"), ids, _integer(0))
        places = _ops.gather(self._weight("embeddings.position_embeddings.weight"), positions, _integer(0))
        # All tokens are of the first type.
        kind = _float(self._tensors["embeddings.token_type_embeddings.weight"][:1])
        return self._norm(_ops.add(_ops.add(words, kind), places), "embeddings.LayerNorm")

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
        return _float(self._tensors[name])


def _read_tensors(file: Path) -> dict[str, NDArray[np.float32]]:
    """Return the float32 tensors of a safetensors file, whose header in JSON says where each of them lies."""
    content = file.read_bytes()
    start = _HEADER_BYTES + int.from_bytes(content[:_HEADER_BYTES], "little")
    header = json.loads(content[_HEADER_BYTES:start])
    tensors = {}
    for name, described in header.items():
        if described.get("dtype") == "F32":
            first, end = (start + offset for offset in described["data_offsets"])
            tensors[name] = np.frombuffer(memoryview(content)[first:end], "<f4").reshape(described["shape"])
    return tensors


def _float(values: float | NDArray[np.float32]) -> Any:
    return _ops.constant(np.asarray(values, np.float32))


def _integer(value: int) -> Any:
    return _ops.constant(np.asarray(value, np.int64))


def _integers(*values: int) -> Any:
    return _ops.constant(np.asarray(values, np.int64))


def main() -> None:
    """Write the graph, with float16 weights; the first argument is the model's directory, the last the target."""
    _, directory, *_, target = sys.argv
    openvino.save_model(build(Path(directory)), target, compress_to_fp16=True)
