"""The engine on OpenVINO: the fastest on CPU, with bfloat16 where the processor has it and single precision elsewhere."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from kp_scorer.embedding.bert_graph import build, openvino
from kp_scorer.embedding.embedder import MAX_TOKENS, Ids, Int64s, Recipe, Vectors, padded, rounded_up
from kp_scorer.embedding.model import ModelFiles
from kp_scorer.embedding.text_embedder import TextEmbedder
from kp_scorer.errors import EngineUnavailable
from kp_scorer.logs import library_logger

_SAME: Final = 0.99  # Above this similarity two vectors are of one text; in half precision they differ by less than 0.001.
_TRIES: Final = 3
_DISAGREE: Final = "openvino gives different vectors for one text"

log = library_logger(__name__)


class OpenVinoEmbedder(TextEmbedder):
    """Runs a model of BERT's family, as the default one is.

    Texts with as many tokens as the model accepts, 512 at most, run on a copy compiled for exactly that shape, which is a tenth
    faster. Most traces are longer, and so are cut to this length.
    """

    # Long texts run one by one, and short ones together if little is padded: a forward pass of its own costs a text as much as
    # 15 more tokens. Few shapes also keep memory flat, because OpenVINO keeps a megabyte for each shape that it has run.
    max_tokens = MAX_TOKENS
    step = 32

    def __init__(self, model: ModelFiles, recipe: Recipe, threads: int) -> None:
        """Compile the model's graph; raise EngineUnavailable if it has none, or if streams give different vectors."""
        super().__init__(model, recipe)
        self.streams = threads
        # One pass waits behind each running one, so that no stream is idle.
        self.most_passes = 2 * threads if threads > 1 else 1
        self._longest = model.max_tokens
        self._full_length = min(model.max_tokens, MAX_TOKENS)
        core = openvino.Core()
        precision = "bf16" if "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": threads,
            # Otherwise each process pins its threads to the same first cores.
            "ENABLE_CPU_PINNING": False,
        }
        core.set_property("CPU", options)
        graph = build(model)
        self.engine = f"openvino {precision} on {threads} threads"
        self.dimensions = int(graph.output(0).get_partial_shape()[1].get_length())
        models = {False: graph, True: _for_one_full_text(graph, self._full_length)}
        for _ in range(_TRIES):
            # ``_together`` runs passes one after another on all threads, ``_side_by_side`` runs each on a thread of its own.
            # The latter is faster for several passes, because threads that share a pass wait for each other a hundred times in
            # it; a single pass ends soonest on all threads. Both have a model for passes of one full text, and one for others.
            self._together = {is_full: _Streams(core, model, 1) for is_full, model in models.items()}
            self._side_by_side = self._together
            if threads > 1:
                self._side_by_side = {is_full: _Streams(core, model, threads) for is_full, model in models.items()}
            # Begin with the largest shape: memory that grows from shape to shape leaves 40 MB of holes.
            if self._agrees(self._full_length - 1) and self._agrees(self._full_length):
                return
            log.warning("streams_disagree", detail=_DISAGREE)
        raise EngineUnavailable(_DISAGREE)

    def _agrees(self, length: int) -> bool:
        # Check that a text of this many tokens gets the same vector from every stream. In one of several hundred processes,
        # a stream gave other vectors throughout its life, and those would stay in the log. Compiling again makes new streams.
        text = [[0] * length]
        (alone,), *side_by_side = *self.run_passes([text]), *self.run_passes([text] * self.streams)
        # Compare in this way to refuse NaN, with which every comparison is false.
        return all(float(vectors[0] @ alone) > _SAME for vectors in side_by_side)

    def run_passes(self, groups: Sequence[Sequence[Ids]]) -> list[Vectors]:
        """Run a forward pass for each group of texts; see the base class."""
        vectors = {}
        for is_full in (True, False):
            inputs = [self._inputs(group) for group in groups if self._is_full(group) == is_full]
            # Give each thread an equal number. If a few are left over, all threads together finish them sooner.
            left_over = len(inputs) % self.streams
            if left_over > self.streams // 2:
                left_over = 0
            # Begin with the longest, so that all threads end at about the same time.
            side_by_side = self._side_by_side[is_full].run(inputs[left_over:][::-1])[::-1]
            vectors[is_full] = iter(self._together[is_full].run(inputs[:left_over]) + side_by_side)
        return [next(vectors[self._is_full(group)]) for group in groups]

    def run_pass(self, group: Sequence[Ids], *, together: bool) -> Vectors:
        """Run one forward pass; see the base class."""
        streams = self._together if together else self._side_by_side
        (vectors,) = streams[self._is_full(group)].run([self._inputs(group)])
        return vectors

    def _is_full(self, group: Sequence[Ids]) -> bool:
        # If a model takes only short texts, several full ones may share a pass.
        return len(group) == 1 and len(group[0]) == self._full_length

    def _inputs(self, group: Sequence[Ids]) -> Sequence[Int64s]:
        if self._is_full(group):
            return (np.array(group, np.int64),)
        return padded(group, min(rounded_up(max(map(len, group)), self.step), self._longest))


def _for_one_full_text(model: openvino.Model, length: int) -> openvino.Model:
    """Return a copy of the model for ids of shape (1, length) and no mask."""
    shape = [1, length]
    full = model.clone()
    full.reshape({0: shape, 1: shape})
    mask = full.inputs[1].get_node()
    ones = openvino.op.Constant(np.ones(shape, np.int64))
    for user in mask.output(0).get_target_inputs():
        user.replace_source_output(ones.output(0))
    full.remove_parameter(mask)
    return full


class _Streams:
    # A model compiled for several streams, with requests that wait inside OpenVINO for a free one. So a stream needs no Python
    # between texts, for which it would often wait until another thread releases the interpreter.

    def __init__(self, core: openvino.Core, model: openvino.Model, streams: int) -> None:
        self._model = core.compile_model(model, "CPU", {"NUM_STREAMS": streams})
        # One request waits behind each running one, so that no stream is idle.
        self._most = 2 * streams
        self._idle: list[openvino.InferRequest] = []

    def run(self, inputs: Sequence[Sequence[Int64s]]) -> list[Vectors]:
        running: deque[openvino.InferRequest] = deque()
        results = []
        for arrays in inputs:
            if len(running) == self._most:
                results.append(self._finish(running.popleft()))
            try:
                request = self._idle.pop()
            except IndexError:
                # No request is idle; another thread may have just taken the last one.
                request = self._model.create_infer_request()
            # The request uses the inputs' memory, so they must live until it is finished.
            request.start_async(arrays, share_inputs=True)
            running.append(request)
        return results + [self._finish(request) for request in running]

    def _finish(self, request: openvino.InferRequest) -> Vectors:
        request.wait()
        # Copy it, because the next forward pass of the request overwrites its memory.
        vectors: Vectors = request.get_output_tensor().data.copy()
        self._idle.append(request)
        return vectors
