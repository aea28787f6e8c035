"""What an audit makes of an entry and the decision that rests on it."""

import numpy as np
import pytest
from kp_scorer.decision import Decision
from kp_scorer.novelty import Window
from kp_scorer.novelty.audit import Decided, Report, audit
from kp_scorer.novelty.log import Entry, Place

from tests.support.builders import decision_on

ENTRY = Entry(Place.parse("1000-1"), "kp:trace:1", b"a" * 16, np.eye(1, 8, dtype=np.float32)[0])


def audited(novelty: float, digest: bytes, entry: str = "1000-1") -> Report:
    """An audit of a log with one entry, which is as new as can be."""
    made = Decision.model_validate_json(decision_on(ENTRY.trace_id))
    decision = made.model_copy(
        update={
            "novelty": made.novelty.model_copy(update={"entry": entry}),
            "dimensions": made.dimensions.model_copy(update={"novelty": novelty}),
        }
    )
    return audit([ENTRY], lambda ids: [Decided(decision, digest)], Window(10, 60_000, 0, 0), lambda done, total: None)


@pytest.mark.parametrize(("novelty", "is_of_other_content"), [(0.5, False), (0.123, False), (0.5, True)])
def test_a_decision_rests_on_an_entry_of_its_own_content(novelty: float, is_of_other_content: bool) -> None:
    report = audited(novelty, b"b" * 16 if is_of_other_content else ENTRY.digest)
    agrees = novelty == 0.5 and not is_of_other_content
    assert (report.entries, report.agreeing, report.undecided) == (1, int(agrees), 0)
    assert [
        (found.trace_id, found.entry, found.decided, found.recomputed, found.is_of_other_content)
        for found in report.differences
    ] == ([] if agrees else [(ENTRY.trace_id, "1000-1", novelty, 0.5, is_of_other_content)])


def test_a_decision_that_rests_on_another_entry_says_nothing_of_this_one() -> None:
    assert (report := audited(0.5, b"b" * 16, "1000-2")).undecided == 1
    assert report.differences == []
