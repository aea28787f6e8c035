"""The engine on OpenVINO: the fastest on CPU, with bfloat16 where the processor has it and single precision elsewhere."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from worker.embedding.embedder import MAX_TOKENS, Vectors
from worker.embedding.engine import Ids

Int64s = NDArray[np.int64]


class OpenVinoEngine:
    """Runs a converted model, in two ways: a text at a time on all threads, or as many texts as threads side by side.

    Side by side is the faster one for several texts, because threads that share a text wait for each other a hundred times
    a forward pass; all threads on one text answer soonest. Texts that fill the model have a way of their own: what is
    compiled for exactly one shape is a tenth faster, and most traces fill the model.
    """

    # Long texts one by one, and short ones together if hardly anything is padded: a forward pass costs as much as 15 tokens
    # more would. A small number of shapes also keeps memory flat, for OpenVINO keeps a megabyte for each that it has met.
    max_tokens = MAX_TOKENS
    step = 16

    def __init__(self, file: Path, threads: int) -> None:
        """Read a converted model and compile it for ``threads`` threads."""
        core = openvino.Core()
        precision = "bf16" if "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"
        options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": threads,
            # Each process would pin its threads to the same first cores.
            "ENABLE_CPU_PINNING": False,
        }
        model = core.read_model(file)
        together = core.compile_model(model, "CPU", options | {"NUM_STREAMS": 1})
        self._together = together.create_infer_request()
        streams = options | {"NUM_STREAMS": threads}
        self._side_by_side = _Streams(core.compile_model(model, "CPU", streams))
        self._full = _Streams(core.compile_model(_for_one_full_text(model), "CPU", streams))
        self._threads = threads
        self.name = f"openvino {precision} on {threads} threads"
        self.dimensions = int(together.output(0).get_partial_shape()[1].get_length())

    def run(self, groups: Sequence[Sequence[Ids]]) -> list[Vectors]:
        """Run a forward pass for each group of texts; each gives float32 unit vectors of shape (len(group), dimensions)."""
        inputs = [_padded(group, self.step) for group in groups]
        alone = self._left_over(len(inputs))
        running: deque[tuple[_Streams, openvino.InferRequest]] = deque()
        found = []
        # The longest first, so that all threads end at about the same time; groups come shortest first.
        for ids, mask in reversed(inputs[alone:]):
            # One waits behind each that runs, so that no stream has to wait for Python. More would only take memory, some 4 MB
            # each.
            if len(running) == 2 * self._threads:
                streams, request = running.popleft()
                found.append(streams.finish(request))
            if ids.shape == (1, MAX_TOKENS) and mask.all():
                running.append((self._full, self._full.start([ids])))
            else:
                running.append((self._side_by_side, self._side_by_side.start([ids, mask])))
        found += [streams.finish(request) for streams, request in running]
        for ids, mask in reversed(inputs[:alone]):
            self._together.infer([ids, mask], share_inputs=True)
            found.append(self._together.get_output_tensor().data.copy())
        return found[::-1]

    def _left_over(self, count: int) -> int:
        """How many of so many groups all threads should take one after the other."""
        # When all threads have had equally many, a few that are left are done sooner by all threads together.
        left_over = count % self._threads
        return left_over if left_over <= self._threads // 2 else 0


def _padded(group: Sequence[Ids], step: int) -> tuple[Int64s, Int64s]:
    """Ids and mask of a group, of shape (texts, tokens)."""
    width = min(-(-max(map(len, group)) // step) * step, MAX_TOKENS)
    ids = np.zeros((len(group), width), np.int64)
    mask = np.zeros((len(group), width), np.int64)
    for index, row in enumerate(group):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    return ids, mask


def _for_one_full_text(model: openvino.Model) -> openvino.Model:
    """The model for ids of shape (1, 512) and no mask."""
    shape = [1, MAX_TOKENS]
    full = model.clone()
    full.reshape({0: shape, 1: shape})
    mask = full.inputs[1].get_node()
    ones = openvino.op.Constant(np.ones(shape, np.int64))
    for user in mask.output(0).get_target_inputs():
        user.replace_source_output(ones.output(0))
    full.remove_parameter(mask)
    return full


class _Streams:
    """A model compiled for several streams, and requests that wait for a free one by themselves.

    Between texts a stream needs no Python: a callback would often have to wait for another thread to let go of the interpreter.
    """

    def __init__(self, model: openvino.CompiledModel) -> None:
        self._model = model
        self._idle: list[openvino.InferRequest] = []

    def start(self, inputs: list[Int64s]) -> openvino.InferRequest:
        """Queue a forward pass; the inputs must live until it is finished."""
        request = self._idle.pop() if self._idle else self._model.create_infer_request()
        request.start_async(inputs, share_inputs=True)
        return request

    def finish(self, request: openvino.InferRequest) -> Vectors:
        """Wait for a forward pass and take its vectors."""
        request.wait()
        # The request's own memory is used again by the next forward pass.
        vectors: Vectors = request.get_output_tensor().data.copy()
        self._idle.append(request)
        return vectors
