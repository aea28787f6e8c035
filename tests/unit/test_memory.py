"""A worker returns the memory of a burst to the system."""

import psutil
from kp_scorer.process.memory import collect_garbage

_PIECES = 50_000


def test_pages_of_a_burst_are_returned_to_the_system() -> None:
    process = psutil.Process()
    pieces = [bytes(1_000) for _ in range(_PIECES)]
    # While the last piece is alive, malloc does not return the pages below it by itself.
    last = pieces.pop()
    burst = process.memory_info().rss
    pieces.clear()
    collect_garbage()
    assert burst - process.memory_info().rss > 0.8 * 1_000 * _PIECES
    assert len(last) == 1_000
