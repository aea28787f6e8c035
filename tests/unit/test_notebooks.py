"""The notebooks show what their code shows."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.notebook import Cell, code_cells, shown_by
from tests.support.paths import REPOSITORY

NOTEBOOKS: Final = sorted((REPOSITORY / "deploy" / "notebooks").glob("*.ipynb"))


def cell(source: str, *outputs: Cell) -> Cell:
    return {"cell_type": "code", "source": source.splitlines(keepends=True), "outputs": list(outputs)}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_outputs_of_a_notebook_are_those_of_its_code(path: Path, tmp_path: Path) -> None:
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    cells = code_cells(notebook)
    assert len(cells) >= 5
    assert shown_by(cells, tmp_path) == [each["outputs"] for each in cells]
    assert list(tmp_path.iterdir()) == [], "it leaves files behind"


@pytest.mark.parametrize("others", ["data", "customer service v1.2"])
def test_thresholds_are_chosen_whatever_domains_there_are(others: str, tmp_path: Path) -> None:
    """Half of the traces are of each domain, so that none is left for the others."""
    cells = code_cells(json.loads((NOTEBOOKS[0].parent / "choose-thresholds.ipynb").read_text("utf-8")))
    renamed = (
        f"domains = ['code', '{others}'] * len(decisions)\n"
        "decisions = [each.model_copy(update={'domain': name}) for each, name in zip(decisions, domains)]\n"
        "table = pd.DataFrame(rows(decisions))"
    )
    (scored,) = (number for number, each in enumerate(cells, 1) if "decisions = " in "".join(each["source"]))
    checked = f"assert list(thresholds.index) == ['code', '{others}'] and 0 < default < 1, default"
    shown_by([*cells[:scored], cell(renamed), *cells[scored:], cell(checked)], tmp_path)


def test_cells_share_variables_and_output_prints_and_their_last_expression(tmp_path: Path) -> None:
    cells = [cell("number = 6"), cell("print('a')\nprint('b')\nnumber * 7"), cell("None"), cell("if number:\n    number")]
    outputs_by_cell = shown_by(cells, tmp_path)
    assert [len(outputs) for outputs in outputs_by_cell] == [0, 2, 0, 0]
    stream, result = outputs_by_cell[1]
    assert stream["text"] == ["a\n", "b\n"]
    assert result["data"] == {"text/plain": ["42"]}


def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        shown_by([cell("1 / 0\n")], tmp_path)
