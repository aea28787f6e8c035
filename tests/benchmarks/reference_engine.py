"""The reference SDK's engine in a process of its own: transformers.js from npm, on the same weights exported to ONNX."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.embedding.model import ModelFiles, find_model

from tests.benchmarks.common import say

_PACKAGE: Final = Path(__file__).parent / "reference"
_NAME: Final = "model"
_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json")


class Embedded(NamedTuple):
    """Vectors, and the seconds that an engine took for them; passing them between processes is not counted."""

    vectors: Vectors
    seconds: float


class ReferenceEngine:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def embed(self, texts: Sequence[str]) -> Embedded:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(list(texts)) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Embedded(np.array(answer["vectors"], np.float32), answer["ms"] / 1_000)


@contextmanager
def reference_engine() -> Iterator[ReferenceEngine | None]:
    """Install the engine from npm beside its package.json if it is not there, export the model, start the engine and yield it.

    Yield None if it cannot run: it needs node, npm and ``kp-scorer[embedding,benchmark]``.
    """
    if not (shutil.which("node") and shutil.which("npm") and find_spec("onnx")):
        yield None
        return
    if not (_PACKAGE / "node_modules").is_dir():
        say("installing transformers.js")
        # Without the variable an install script would fetch CUDA.
        environment = os.environ | {"ONNXRUNTIME_NODE_INSTALL_CUDA": "skip"}
        command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(command, cwd=_PACKAGE, env=environment, check=True, stdout=sys.stderr)
    model = find_model("")
    assert model, "the package with the default weights is not installed"
    with tempfile.TemporaryDirectory(prefix="kp-benchmark-") as models:
        _write_model(model, Path(models) / _NAME)
        command = ["node", str(_PACKAGE / "embed.mjs"), models, _NAME]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield ReferenceEngine(process)
            assert process.stdin
            process.stdin.close()


def _write_model(model: ModelFiles, directory: Path) -> None:
    (directory / "onnx").mkdir(parents=True)
    for name in _FILES:
        shutil.copy(model.path / name, directory)
    say("exporting the model to ONNX")
    # Export in a new process: in this one, torch would take cores and memory from the measurement.
    code = "import sys; from tests.benchmarks.reference_engine import export; export(*sys.argv[1:])"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, model.path, directory / "onnx" / "model.onnx"], check=True)


def export(model_path: str, target: str) -> None:
    import torch
    from kp_scorer.embedding.embedder import MAX_TOKENS
    from kp_scorer.embedding.torch_engine import load_model

    names = ["input_ids", "attention_mask", "token_type_ids"]
    ids = torch.arange(16).reshape(2, 8)
    transformer = load_model(Path(model_path), Path(model_path) / "tokenizer.json", MAX_TOKENS, "cpu")[0]

    class Transformer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = transformer

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.transformer(dict(zip(names, inputs, strict=True)))["token_embeddings"]
            return output

    torch.onnx.export(
        Transformer(),
        (ids, torch.ones_like(ids), torch.zeros_like(ids)),
        target,
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in [*names, "last_hidden_state"]},
        dynamo=False,
    )
