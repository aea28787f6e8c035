"""Runs the code of notebooks without Jupyter, in one fresh process, and returns its outputs.

``python -m tests.support.notebook FILE`` writes the outputs into the notebook, which no test does.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.support.paths import REPOSITORY

Cell = dict[str, Any]

NOTEBOOKS: Final = sorted((REPOSITORY / "deploy" / "notebooks").glob("*.ipynb"))

_RUN: Final = """
import ast, contextlib, io, json, sys

outputs = []
names = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "<cell>", "exec"), names)
        value = eval(compile(last, "<cell>", "eval"), names) if last else None
    outputs.append([printed.getvalue(), None if value is None else repr(value)])
json.dump(outputs, sys.stdout)
"""


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shown_by(cells: list[Cell], folder: Path) -> list[list[Cell]]:
    """Run cells one after the other in a process that begins in ``folder``; return the outputs of each, as texts.

    Raises:
        RuntimeError: a cell fails; the message is what the process wrote to stderr.
    """
    sources = json.dumps(["".join(cell["source"]) for cell in cells])
    done = subprocess.run(
        [sys.executable, "-c", _RUN], input=sources, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [_outputs(printed, value) for printed, value in json.loads(done.stdout)]


def _outputs(printed: str, value: str | None) -> list[Cell]:
    outputs: list[Cell] = []
    if printed:
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": value.splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


if __name__ == "__main__":
    path = Path(sys.argv[1])
    notebook = json.loads(path.read_text("utf-8"))
    cells = code_cells(notebook)
    for cell, outputs in zip(cells, shown_by(cells, Path.cwd()), strict=True):
        cell["outputs"] = outputs
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
