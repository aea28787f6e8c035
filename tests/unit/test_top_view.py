"""What `kp-scorer top` warns of."""

import io

import pytest
from kp_scorer.broker.backlog import Backlog
from kp_scorer.cli.view import Look, view
from kp_scorer.store import Counts
from rich.console import Console


@pytest.mark.parametrize(("used", "is_told"), [(None, False), (0.0, False), (0.79, False), (0.85, True)])
def test_a_redis_that_fills_is_told_of(used: float | None, is_told: bool) -> None:
    shown = Console(file=io.StringIO(), width=120, record=True)
    shown.print(view(Look(0.0, Counts(0, 0, 0, 0), Backlog({}, {}, (), 0, 0.0, used), 0, []), None))
    assert ("Redis has taken 85% of its memory" in shown.export_text()) == is_told
