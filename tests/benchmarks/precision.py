"""Measures the distance of scores from the reference's, for each precision in which OpenVINO computes.

- ``reference``: the largest difference between a score of the first N real traces and the reference's.
- ``of_float32``: the largest difference between a score and that in float32, for N unseen real traces from each set.

A processor that lacks a precision computes in another one: without bfloat16, the two rows are alike.
"""

import gzip
import json
import random
from collections.abc import Iterator
from typing import Any, Final
from unittest.mock import patch

from kp_scorer import score_traces
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding.bert_graph import openvino
from kp_scorer.limits import Limits
from kp_scorer.settings import load_settings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, real, report
from tests.support.paths import REFERENCE_TRACES

_PRECISIONS: Final = ("f32", "bf16")


def main() -> None:
    options = arguments(__doc__, traces=423, unseen=130).parse_args()
    report("precision", rows_of(options.traces, options.unseen))


def rows_of(count: int, of_each: int) -> Iterator[Row]:
    expected = [json.loads(line)["score"] for line in (REFERENCE_TRACES / "expected.jsonl").read_text("utf-8").splitlines()]
    traces, unseen = real(count, required=True), _unseen(of_each)
    in_float32: list[float] = []
    for precision in _PRECISIONS:
        scores, of_unseen = _scores(traces, precision), _scores(unseen, precision)
        in_float32 = in_float32 or of_unseen
        pairs = {"reference": zip(scores, expected, strict=False), "of_float32": zip(of_unseen, in_float32, strict=True)}
        differences = {name: max(abs(score - exact) for score, exact in pair) for name, pair in pairs.items()}
        yield {"precision": precision, "traces": len(traces), "unseen": len(unseen), **differences}


def _scores(traces: list[ReasoningTrace], precision: str) -> list[float]:
    class Core(openvino.Core):  # type: ignore[misc]  # openvino ships no types
        def set_property(self, device: str, options: dict[str, Any]) -> None:
            super().set_property(device, {**options, "INFERENCE_PRECISION_HINT": precision})

    with patch.object(openvino, "Core", Core):
        return [decision.score for decision in score_traces(traces, load_settings({"embedding.embedder": "openvino"}))]


def _unseen(of_each: int) -> list[ReasoningTrace]:
    """Return ``of_each`` runs of each set beside the real traces, shuffled."""
    shuffle, rows = random.Random(1), list[str]()
    for file in sorted((REFERENCE_TRACES / "sets").glob("*.jsonl.gz")):
        rows += shuffle.sample(gzip.decompress(file.read_bytes()).decode().splitlines(), of_each)
    shuffle.shuffle(rows)
    return [decode_trace(json.loads(row), Limits()) for row in rows]


if __name__ == "__main__":
    main()
