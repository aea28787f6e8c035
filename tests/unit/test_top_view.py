"""What `kp-scorer top` warns of."""

import io

import pytest
from kp_scorer.broker.backlog import Backlog
from kp_scorer.cli.view import Look, view
from kp_scorer.store import Counts
from rich.console import Console


@pytest.mark.parametrize(("used", "told"), [(None, ""), (0.0, ""), (0.79, ""), (0.8, "80%"), (0.85, "85%")])
def test_a_redis_that_fills_is_told_of(used: float | None, told: str) -> None:
    shown = Console(file=io.StringIO(), width=120, record=True)
    shown.print(view(Look(0.0, Counts(0, 0, 0, 0), Backlog({}, {}, (), 0, 0.0, used), 0, []), None))
    text = shown.export_text()
    assert ("maxmemory" in text) == bool(told)
    assert told in text
