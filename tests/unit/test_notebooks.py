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
