"""The stored outputs of notebooks are those of their code, which leaves no files behind."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.notebook import NOTEBOOKS, code_cells, shown_by


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_outputs_of_a_notebook_are_those_of_its_code(path: Path, tmp_path: Path) -> None:
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    cells = code_cells(notebook)
    assert len(cells) >= 5
    assert shown_by(cells, tmp_path) == [each["outputs"] for each in cells]
    assert list(tmp_path.iterdir()) == [], "it leaves files behind"


def test_thresholds_are_chosen_whatever_domains_there_are(tmp_path: Path) -> None:
    """The notebook works with any domains: here three new ones share all traces."""
    cells = code_cells(json.loads((NOTEBOOKS[0].parent / "choose-thresholds.ipynb").read_text("utf-8")))
    domains = ["code", "customer service v1.2", "data"]
    renamed = (
        f"domains = {domains} * len(decisions)\n"
        "decisions = [each.model_copy(update={'domain': name}) for each, name in zip(decisions, domains)]\n"
        "table = pd.DataFrame(rows(decisions))"
    )
    (scored,) = (number for number, each in enumerate(cells, 1) if "decisions = " in "".join(each["source"]))
    checked = f"assert list(thresholds.index) == {domains} and 0 < default < 1, default"
    shown_by([*cells[:scored], {"source": renamed}, *cells[scored:], {"source": checked}], tmp_path)
