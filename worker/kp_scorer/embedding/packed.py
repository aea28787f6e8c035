"""Runs forward passes of BERT's family over packed texts, which lie one behind the other, so that nothing is padded.

Any texts share a pass, whatever their lengths. On a GPU, a padded pass would compute the padding and its mask as well.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import linear, normalize, pad, scaled_dot_product_attention

from kp_scorer.embedding.embedder import Ids, Vectors
from kp_scorer.embedding.model import BERT_FAMILY, OFFSET_POSITIONS

_NO_PADDING: Final = -1  # No token has this id.
_LEAST_RECORDED: Final = 512  # The tokens of the smallest recorded pass; each further one has twice as many.
_LEAST_TOKENS_OF_A_TEXT: Final = 16  # A pass whose texts are shorter on average is not replayed.

_Weights = tuple[torch.Tensor, torch.Tensor]  # A matrix, and the bias that is added to its product.


class _Layer(NamedTuple):
    attention: _Weights  # Query, key and value in one product.
    attended: _Weights
    attended_norm: Any
    widened: _Weights
    activation: Any
    narrowed: _Weights
    norm: Any


def _attend_on_gpu(
    starts: torch.Tensor, longest: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attend within each text, by torch's own flash attention."""
    attended = varlen_attn(query, key, value, starts, starts, longest, longest)
    assert isinstance(attended, torch.Tensor)
    return attended


def _attend_on_cpu(lengths: list[int], *parts: torch.Tensor) -> torch.Tensor:
    """Attend within one text after the other."""
    by_text = (part.transpose(0, 1).split(lengths, 1) for part in parts)
    attended = [scaled_dot_product_attention(*each) for each in zip(*by_text, strict=True)]
    return torch.cat(attended, 1).transpose(0, 1)


class PackedModel:
    """A sentence-transformers model of BERT's family, with mean pooling or the first token's vector.

    Matrix products are of the type ``products``, and weights are converted to it once. The residual stream, norms and sums stay
    float32: in half precision they would lose digits that scores need.
    """

    def __init__(self, model: SentenceTransformer, products: torch.dtype) -> None:
        """Take over the weights of a model in single precision; raise ValueError for a model of another kind."""
        body: Any = model.transformers_model
        config = body.config
        _, pooling, *self._others = model
        self._pools_mean = getattr(pooling, "pooling_mode", None) == "mean"
        is_pooled = self._pools_mean or getattr(pooling, "pooling_mode", None) == "cls"
        if config.model_type not in BERT_FAMILY or config.is_decoder or not is_pooled:
            raise ValueError("models of this kind cannot be packed")
        self._products = products
        self._heads = int(config.num_attention_heads)
        # Models with offset positions count them from one above the padding token's id, and leave that token out.
        self._padding_id = int(config.pad_token_id) if config.model_type in OFFSET_POSITIONS else _NO_PADDING
        self._words = body.embeddings.word_embeddings
        # All tokens are of the first type.
        self._places = body.embeddings.position_embeddings.weight + body.embeddings.token_type_embeddings.weight[0]
        self._norm = body.embeddings.LayerNorm
        self._layers = [self._converted(layer) for layer in body.encoder.layer]

    def vectors(self, ids: torch.Tensor, sizes: torch.Tensor, longest: int) -> torch.Tensor:
        """Return float32 unit vectors of shape (texts, dimensions); those of texts without tokens are NaN.

        ``ids``, int64 of shape (tokens,), has the ids of all texts; on a GPU others may follow, which belong to no text.
        ``sizes``, int64 of shape (texts,) on the same device, has the texts' lengths, at most ``longest`` each.
        """
        starts = pad(sizes.cumsum(0), (1, 0))
        # The text of each token; for tokens that belong to none, a number beyond the last.
        texts = torch.searchsorted(starts[1:], torch.arange(len(ids), device=ids.device), right=True)
        hidden = self._norm(self._words(ids) + self._places[self._positions(ids, texts, starts)])
        attend = partial(_attend_on_gpu, starts.int(), longest) if ids.is_cuda else partial(_attend_on_cpu, sizes.tolist())
        for layer in self._layers:
            hidden = self._run(layer, hidden, attend)
        if self._pools_mean:
            sums = hidden.new_zeros(len(starts), hidden.shape[1]).index_add_(0, texts, hidden)
            pooled = sums[:-1] / sizes[:, None]
        else:
            pooled = hidden[starts[:-1].clamp(max=len(ids) - 1)]
        features = {"sentence_embedding": pooled}
        for module in self._others:
            features = module(features)
        return normalize(features["sentence_embedding"].float(), dim=1)

    def _positions(self, ids: torch.Tensor, texts: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        is_counted = ids != self._padding_id
        counted = pad(is_counted.cumsum(0), (1, 0))
        positions = (counted[1:] - counted[starts[texts]]) * is_counted + self._padding_id
        return positions.clamp(max=len(self._places) - 1)

    def _run(self, layer: _Layer, hidden: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        parts = self._product(hidden, layer.attention).view(len(hidden), 3, self._heads, -1).unbind(1)
        attended = self._product(attend(*parts).flatten(1), layer.attended)
        hidden = layer.attended_norm(hidden + attended)
        widened = layer.activation(self._product(hidden, layer.widened))
        return layer.norm(hidden + self._product(widened, layer.narrowed))

    def _product(self, hidden: torch.Tensor, weights: _Weights) -> torch.Tensor:
        return linear(hidden.to(self._products), *weights)

    def _converted(self, layer: Any) -> _Layer:
        inputs, output = layer.attention.self, layer.attention.output
        return _Layer(
            self._weights(inputs.query, inputs.key, inputs.value),
            self._weights(output.dense),
            output.LayerNorm,
            self._weights(layer.intermediate.dense),
            layer.intermediate.intermediate_act_fn,
            self._weights(layer.output.dense),
            layer.output.LayerNorm,
        )

    def _weights(self, *parts: Any) -> _Weights:
        with torch.inference_mode():
            weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
            return weight.to(self._products), bias.to(self._products)


class _Graph:
    """A pass that is recorded once and replayed by one call, as each of its hundred calls would wait for the interpreter."""

    def __init__(self, model: PackedModel, device: torch.device, tokens: int, longest: int, pool: Any) -> None:
        self.tokens = tokens
        self.texts = max(1, tokens // _LEAST_TOKENS_OF_A_TEXT)
        self._inputs = torch.zeros(tokens + self.texts, dtype=torch.int64, device=device)
        self._inputs[tokens] = min(tokens, longest)
        ids, sizes = self._inputs[:tokens], self._inputs[tokens:]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            # Run once before recording, because the set-up of kernels on their first run cannot be recorded.
            model.vectors(ids, sizes, longest)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._vectors = model.vectors(ids, sizes, longest)

    def replay(self, inputs: torch.Tensor) -> torch.Tensor:
        """Queue a pass; the next one overwrites its vectors."""
        self._inputs.copy_(inputs, non_blocking=True)
        self._graph.replay()
        return self._vectors


class PackedPasses:
    """Runs a packed model; any thread may run a pass. On a GPU, one pass is packed and copied while another runs."""

    def __init__(self, model: PackedModel, device: torch.device, max_tokens: int, longest: int, dimensions: int) -> None:
        """Prepare for texts of at most ``longest`` tokens. A GPU short of memory lowers ``max_tokens``, the limit of a pass."""
        self._model = model
        self._device = device
        self._longest = longest
        self._dimensions = dimensions
        self._queueing = threading.Lock()
        self._graphs: list[_Graph] = []
        self.max_tokens = max_tokens
        if device.type == "cuda":
            self._record()

    @torch.inference_mode()
    def run(self, group: Sequence[Ids]) -> Vectors:
        """Return float32 unit vectors of shape (texts, dimensions)."""
        count, tokens = len(group), sum(map(len, group))
        graph = next((each for each in self._graphs if tokens <= each.tokens and count <= each.texts), None)
        room, texts = (graph.tokens, graph.texts) if graph else (tokens, count)
        packed = np.zeros(room + texts, np.int64)
        packed[:tokens] = np.fromiter(chain(*group), np.int64, tokens)
        packed[room : room + count] = list(map(len, group))
        inputs = torch.from_numpy(packed)
        if self._device.type == "cpu":
            return self._model.vectors(inputs[:room], inputs[room:], self._longest).numpy()
        inputs, vectors = inputs.pin_memory(), torch.empty((count, self._dimensions), pin_memory=True)
        copied = torch.cuda.Event(blocking=True)
        with self._queueing:
            if graph:
                computed = graph.replay(inputs)
            else:
                on_device = inputs.to(self._device, non_blocking=True)
                computed = self._model.vectors(on_device[:room], on_device[room:], self._longest)
            vectors.copy_(computed[:count], non_blocking=True)
            copied.record()
        copied.synchronize()
        # Copy the vectors, as pinned memory is scarce.
        return np.array(vectors.numpy())

    @torch.inference_mode()
    def _record(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        tokens = min(_LEAST_RECORDED, self.max_tokens)
        while tokens <= self.max_tokens:
            try:
                self._graphs.append(_Graph(self._model, self._device, tokens, self._longest, pool))
            except torch.OutOfMemoryError:
                if not self._graphs:
                    raise
                self.max_tokens = self._graphs[-1].tokens
                return
            tokens *= 2
