"""The micro-batcher: what it puts together, and what it keeps apart when something fails."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

import pytest
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.process.batcher import MicroBatcher

from tests.support.processes import wait_until

PATIENCE_S: Final = 10.0


class Item(NamedTuple):
    """A number, and where its result goes."""

    number: int
    future: "Future[int]"


class GatedWork:
    """Doubles numbers, one batch at a time, each only once its gate is open; remembers the batches it was given.

    It does so in the first stage; the second hands over.
    """

    def __init__(self, fail: Callable[[Sequence[int]], None] = lambda batch: None) -> None:
        self.batches: list[list[int]] = []
        self.is_at_work = threading.Lock()
        self.begun = threading.Event()
        self.gate = threading.Event()
        self._fail = fail

    def prepare(self, items: Sequence[Item], *, alone: bool) -> list[int]:
        assert len(items) == 1 or not alone
        batch = [item.number for item in items]
        self.batches.append(batch)
        assert self.is_at_work.acquire(blocking=False), "two batches were prepared at once"
        try:
            self.begun.set()
            assert self.gate.wait(PATIENCE_S)
            self._fail(batch)
            return [number * 2 for number in batch]
        finally:
            self.is_at_work.release()

    def finish(self, work: list[int]) -> list[int | None]:
        return list(work)

    def refresh(self) -> None:
        pass


class Batcher:
    """A batcher whose results come as futures."""

    def __init__(self, work: GatedWork, max_batch: int) -> None:
        self._batcher: MicroBatcher[Item, list[int], int] = MicroBatcher(work, self._hand_on, max_batch)
        self.stop = self._batcher.stop
        self.handed_on: list[list[int | Exception]] = []

    def submit(self, number: int) -> "Future[int]":
        item = Item(number, Future())
        self._batcher.submit(item)
        return item.future

    def _hand_on(self, ended: Sequence[tuple[Item, int | Exception]]) -> None:
        self.handed_on.append([result for _, result in ended])
        for item, result in ended:
            if isinstance(result, Exception):
                item.future.set_exception(result)
            else:
                item.future.set_result(result)


Start = Callable[[GatedWork, int], Batcher]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts batchers, and opens their gates and stops them in the end."""
    started: list[tuple[GatedWork, Batcher]] = []

    def begin(work: GatedWork, max_batch: int) -> Batcher:
        started.append((work, Batcher(work, max_batch)))
        return started[-1][1]

    yield begin
    for work, batcher in started:
        work.gate.set()
        batcher.stop()


def hand_over(batcher: Batcher, work: GatedWork, items: Sequence[int]) -> list["Future[int]"]:
    """Submit the first item, wait until it is being worked on, submit the others behind it, then let work go on."""
    first = batcher.submit(items[0])
    assert work.begun.wait(PATIENCE_S)
    futures = [first, *(batcher.submit(item) for item in items[1:])]
    work.gate.set()
    return futures


def results(futures: Sequence["Future[int]"]) -> list[int]:
    return [future.result(PATIENCE_S) for future in futures]


def failures(futures: Sequence["Future[int]"]) -> list[str | None]:
    return [str(error) if (error := future.exception(PATIENCE_S)) else None for future in futures]


def poisoned_by(poison: int) -> Callable[[Sequence[int]], None]:
    def fail(batch: Sequence[int]) -> None:
        if poison in batch:
            raise ValueError(f"poisoned by {poison}")

    return fail


def test_results_come_to_their_items_in_order(start: Start) -> None:
    work = GatedWork()
    assert results(hand_over(start(work, 4), work, range(10))) == [item * 2 for item in range(10)]


def test_first_item_is_not_kept_waiting_for_others(start: Start) -> None:
    work = GatedWork()
    assert results(hand_over(start(work, 8), work, [1])) == [2]
    assert work.batches == [[1]]


def test_whatever_waits_becomes_one_batch(start: Start) -> None:
    work = GatedWork()
    results(hand_over(start(work, 8), work, [1, 2, 3, 4]))
    assert work.batches == [[1], [2, 3, 4]]


def test_a_batch_is_handed_on_together(start: Start) -> None:
    work = GatedWork()
    batcher = start(work, 8)
    results(hand_over(batcher, work, [1, 2, 3, 4]))
    assert batcher.handed_on == [[2], [4, 6, 8]]


def test_batch_is_bounded_and_the_rest_follows_in_order(start: Start) -> None:
    work = GatedWork()
    results(hand_over(start(work, 3), work, range(9)))
    assert work.batches == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]


def test_batches_of_one_are_possible(start: Start) -> None:
    work = GatedWork()
    results(hand_over(start(work, 1), work, [1, 2, 3]))
    assert work.batches == [[1], [2], [3]]


def test_submitting_does_not_wait_for_the_work(start: Start) -> None:
    work = GatedWork()
    batcher = start(work, 2)
    futures = [batcher.submit(item) for item in range(6)]
    assert not any(future.done() for future in futures)
    work.gate.set()
    assert results(futures) == [item * 2 for item in range(6)]


def test_poisonous_item_fails_alone(start: Start) -> None:
    work = GatedWork(poisoned_by(3))
    futures = hand_over(start(work, 8), work, [1, 2, 3, 4])
    assert failures(futures) == [None, None, "poisoned by 3", None]
    assert [results([future]) for future in (futures[0], futures[1], futures[3])] == [[2], [4], [8]]
    assert work.batches == [[1], [2, 3, 4], [2], [3], [4]]


def test_item_that_fails_alone_is_not_tried_again(start: Start) -> None:
    work = GatedWork(poisoned_by(1))
    assert failures(hand_over(start(work, 8), work, [1])) == ["poisoned by 1"]
    assert work.batches == [[1]]


def test_work_goes_on_after_a_failure(start: Start) -> None:
    work = GatedWork(poisoned_by(1))
    batcher = start(work, 8)
    assert failures(hand_over(batcher, work, [1])) == ["poisoned by 1"]
    assert results([batcher.submit(5)]) == [10]


def test_outage_fails_a_batch_together_and_is_not_tried_again(start: Start) -> None:
    def fail(batch: Sequence[int]) -> None:
        if 2 in batch:
            raise ServiceUnavailable("the log does not answer")

    work = GatedWork(fail)
    futures = hand_over(start(work, 3), work, [1, 2, 3, 4, 5])
    assert failures(futures) == [None, *["the log does not answer"] * 3, None]
    assert all(isinstance(future.exception(), ServiceUnavailable) for future in futures[1:4])
    assert work.batches == [[1], [2, 3, 4], [5]]


def test_outage_while_items_are_tried_one_by_one_fails_only_those_it_meets(start: Start) -> None:
    def fail(batch: Sequence[int]) -> None:
        if len(batch) > 1:
            raise ValueError("poisoned")
        if batch[0] == 3:
            raise ServiceUnavailable("out")

    work = GatedWork(fail)
    assert failures(hand_over(start(work, 8), work, [1, 2, 3, 4])) == [None, None, "out", None]


@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_stop_finishes_what_was_handed_over(max_batch: int) -> None:
    work = GatedWork()
    batcher = Batcher(work, max_batch)
    futures = hand_over(batcher, work, range(7))
    batcher.stop()
    assert all(future.done() for future in futures)
    assert results(futures) == [item * 2 for item in range(7)]


def test_stop_of_an_idle_batcher_ends_at_once_and_does_no_work() -> None:
    work = GatedWork()
    Batcher(work, 8).stop()
    assert work.batches == []


def test_many_threads_may_submit_at_once(start: Start) -> None:
    work = GatedWork()
    work.gate.set()
    batcher = start(work, 5)
    found: dict[int, int] = {}

    def submit(number: int) -> None:
        found[number] = batcher.submit(number).result(PATIENCE_S)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == {number: number * 2 for number in range(30)}
    assert sorted(item for batch in work.batches for item in batch) == list(range(30))
    assert max(map(len, work.batches)) <= 5


class TwoStages(GatedWork):
    """Doubles numbers in the second stage, behind a gate of its own, and wants some numbers alone."""

    def __init__(self, wants_alone: Sequence[int] = (), fails_late: int | None = None) -> None:
        super().__init__()
        self.gate.set()
        self.finished: list[list[int]] = []
        self.finishing = threading.Event()
        self.finish_gate = threading.Event()
        self.in_hand_when_alone: list[int] = []
        self._wants_alone = wants_alone
        self._fails_late = fails_late
        self._in_hand = 0

    def prepare(self, items: Sequence[Item], *, alone: bool) -> list[int]:
        batch = [item.number for item in items]
        self.batches.append(batch)
        if alone:
            self.in_hand_when_alone.append(self._in_hand)
        self._in_hand += 1
        return [number if alone or number not in self._wants_alone else -1 for number in batch]

    def finish(self, work: list[int]) -> list[int | None]:
        self.finishing.set()
        assert self.finish_gate.wait(PATIENCE_S)
        self.finished.append(work)
        self._in_hand -= 1
        if self._fails_late in work:
            raise ValueError(f"poisoned by {self._fails_late}")
        return [None if item < 0 else item * 2 for item in work]


def test_the_next_batch_is_prepared_while_one_is_finished(start: Start) -> None:
    work = TwoStages()
    batcher = start(work, 2)
    futures = [batcher.submit(1)]
    assert work.finishing.wait(PATIENCE_S)
    futures += [batcher.submit(item) for item in (2, 3)]
    wait_until(lambda: len(work.batches) == 2, PATIENCE_S)
    assert work.finished == []
    work.finish_gate.set()
    assert results(futures) == [2, 4, 6]


def test_what_wants_to_be_alone_is_prepared_when_nothing_is_in_hand(start: Start) -> None:
    work = TwoStages(wants_alone=[2, 5])
    batcher = start(work, 3)
    work.finish_gate.set()
    assert results([batcher.submit(item) for item in range(12)]) == [item * 2 for item in range(12)]
    assert [2] in work.batches
    assert [5] in work.batches
    assert work.in_hand_when_alone == [0, 0]


def test_a_batch_that_fails_in_the_second_stage_is_tried_one_by_one(start: Start) -> None:
    work = TwoStages(fails_late=3)
    batcher = start(work, 4)
    first = batcher.submit(0)
    assert work.finishing.wait(PATIENCE_S)
    futures = [first, *(batcher.submit(item) for item in (1, 2, 3, 4))]
    work.finish_gate.set()
    assert failures(futures) == [None, None, None, "poisoned by 3", None]


def test_stop_waits_for_what_has_to_be_tried_alone() -> None:
    work = TwoStages(wants_alone=[1, 2, 3])
    batcher = Batcher(work, 4)
    futures = [batcher.submit(item) for item in range(5)]
    work.finish_gate.set()
    batcher.stop()
    assert results(futures) == [0, 2, 4, 6, 8]
