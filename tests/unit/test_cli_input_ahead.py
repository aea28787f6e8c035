"""Reading ahead: what is there is given at once, of a file whole batches, and never more than a batch is held."""

import gzip
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
import pytest
from kp_scorer.cli.output import Pace
from kp_scorer.cli.reading import Reading

from tests.support.builders import LIMITS, minimal_payload
from tests.support.processes import wait_until

MOST: Final = 10


def line(number: int, objective: str = "count") -> bytes:
    return json.dumps(minimal_payload(trace_id=f"kp:trace:{number}", objective=objective)).encode() + b"\n"


def numbers(reading: Reading) -> list[list[int]]:
    return [[each.number for each in batch] for batch in reading.batches()]


def readers() -> int:
    return sum(thread.name == "kp-scorer-reader" for thread in threading.enumerate())


@contextmanager
def fifo(directory: Path) -> Iterator[tuple[Reading, int]]:
    """A named pipe that is read, and the descriptor to write to it."""
    path = directory / "pipe"
    os.mkfifo(path)
    reading = Reading(str(path), LIMITS, MOST)
    writing = os.open(path, os.O_WRONLY)
    try:
        yield reading, writing
    finally:
        os.close(writing)


def test_a_file_comes_in_whole_batches(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_bytes(b"".join(map(line, range(25))))
    reading = Reading(str(file), LIMITS, MOST)
    assert numbers(reading) == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    assert reading.total() == (25, False)


def test_a_pipe_gives_what_is_there(tmp_path: Path) -> None:
    with fifo(tmp_path) as (reading, writing):
        batches = reading.batches()
        for number in range(3):
            os.write(writing, line(number))
            assert [each.number for each in next(batches)] == [number + 1]
            assert reading.total() == (None, False)
        # Nobody takes these while they come.
        os.write(writing, b"".join(map(line, range(4))))
        wait_until(lambda: len(reading._lines) == 4)
        assert [each.number for each in next(batches)] == [4, 5, 6, 7]


def test_no_more_than_a_batch_is_read_ahead(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_bytes(b"".join(map(line, range(35))))
    reading = Reading(str(file), LIMITS, MOST)
    batches = reading.batches()
    for done in (10, 20):
        assert len(next(batches)) == MOST
        wait_until(lambda done=done: reading._read == done + MOST)  # type: ignore[misc]
        assert len(reading._lines) == MOST
    batches.close()
    wait_until(lambda: readers() == 0)
    assert reading._read == 30


def test_of_large_lines_few_are_held(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_bytes(b"".join(line(number, "x" * 1_000_000) for number in range(12)))
    assert [len(batch) for batch in numbers(Reading(str(file), LIMITS, MOST))] == [5, 5, 2]


@pytest.mark.parametrize("packed", [False, True])
def test_how_many_there_will_be_is_estimated_by_what_is_left_of_the_file(tmp_path: Path, packed: bool) -> None:
    file = tmp_path / "traces"
    # Random enough that packing them leaves more than one piece to be read.
    content = b"".join(line(number, os.urandom(2_000).hex()) for number in range(200))
    file.write_bytes(gzip.compress(content) if packed else content)
    reading = Reading(str(file), LIMITS, MOST)
    batches = reading.batches()
    next(batches)
    total, is_estimate = reading.total()
    assert total
    assert is_estimate
    assert total == pytest.approx(200, rel=0.9 if packed else 0.05)
    assert sum(map(len, batches)) == 190
    assert reading.total() == (200, False)


def test_of_a_document_the_number_is_known(tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    file.write_bytes(b"[" + b",".join(map(line, range(25))) + b"]")
    reading = Reading(str(file), LIMITS, MOST)
    next(reading.batches())
    assert reading.total() == (25, False)


def test_what_is_wrong_with_the_input_is_raised_after_the_lines_before_it(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl.gz"
    file.write_bytes(gzip.compress(line(0)) + gzip.compress(line(1))[:-40])
    batches = Reading(str(file), LIMITS, MOST).batches()
    assert len(next(batches)) == 1
    with pytest.raises(click.BadParameter, match="cut off"):
        next(batches)
    with pytest.raises(click.BadParameter, match=r"absent: No such file"):
        next(Reading(str(tmp_path / "absent"), LIMITS, MOST).batches())


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_pace_tells_rate_and_what_is_left() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.said(32, None) == "32"
    clock.now_s += 2
    assert pace.said(64, None) == "64, 16 a second"
    assert pace.said(64, 128) == "64 of 128, 16 a second, 4 s left"
    assert pace.said(64, 2_000, is_estimate=True) == "64 of about 2000, 16 a second, 2 min 1 s left"
    assert pace.said(64, 128_000) == "64 of 128000, 16 a second, 2 h 13 min left"
    assert pace.said(64, 64) == "64 of 64, 16 a second"


def test_pace_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    pace = Pace(clock)
    done = 0
    for rate in (100, 1):
        for _ in range(30):
            pace.said(done, None)
            clock.now_s += 1
            done += rate
    assert pace.said(done, None) == f"{done}, 1.0 a second"
