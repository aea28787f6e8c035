"""The stages from admission to commit: which traces they decide together, which alone, and how passes are formed."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.embedding.embedder import TRACE, Embedder, TokenizedText, Vectors
from kp_scorer.errors import ServiceUnavailable, TraceConflict
from kp_scorer.novelty import MemoryLog
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.process.admission import Admission
from kp_scorer.process.commit import CommitStage
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.embed import EmbedStage
from kp_scorer.process.look_up import LookUpStage
from kp_scorer.process.metrics import Metrics
from kp_scorer.reviser import Revised
from kp_scorer.scoring import Policy
from kp_scorer.store.records import MemoryLedger
from prometheus_client import generate_latest

from tests.support.builders import make_trace
from tests.support.processes import PATIENCE_S, wait_until
from tests.support.prometheus import samples_of
from tests.support.word_embedder import WINDOW

Ends = dict[str, Revised | Exception]


class GatedEmbedder(Embedder):
    """An embedder whose tokens are words.

    Each pass waits at a gate; its objectives and whether it has all cores are recorded.
    """

    name, space, dimensions, recipe = "gated", "gated-1", 4, TRACE
    streams, max_tokens, step = 2, 8, 4

    def __init__(self, *, is_open: bool = False, fails_at: str = "nothing", most_passes: int = 2, packs: bool = False) -> None:
        self.most_passes = most_passes
        self.packs = packs
        self.passes: list[tuple[list[str], bool]] = []
        self.gate = threading.Semaphore(1_000_000 if is_open else 0)
        self._fails_at = fails_at

    def tokenize_all(self, texts: Sequence[str], *, plain: bool = False) -> list[TokenizedText]:
        if any("no-tokens" in text for text in texts):
            raise ValueError("no tokens")
        return [TokenizedText(text, [[1] * len(text.split())], "long" not in text) for text in texts]

    def run(self, texts: Sequence[TokenizedText], *, together: bool) -> Vectors:
        self.passes.append(([each.text.strip() for each in texts], together))
        assert self.gate.acquire(timeout=PATIENCE_S)
        return self.embed_tokenized(texts)

    def embed(self, texts: Sequence[str]) -> Vectors:
        if any(self._fails_at in text for text in texts):
            raise ArithmeticError(f"fails at {self._fails_at}")
        return np.tile(np.eye(1, 4, dtype=np.float32), (len(texts), 1))


class Stages:
    """The stages that decide, without the rest of the pipeline."""

    def __init__(self, embedder: GatedEmbedder, group_size: int = 32) -> None:
        self.ends: Ends = {}
        self.ledger = MemoryLedger()
        novelty = NoveltyMeter(embedder, MemoryLog(WINDOW), WINDOW)
        decider, self.metrics = Decider(self.ledger, Policy(), novelty, max_attempts=5), Metrics(())
        self.admission = Admission(group_size, self._resolve, {})
        self.commit = CommitStage(self.admission, decider, self.metrics)
        self.embed = EmbedStage(self.admission, decider, novelty, self.metrics, self.commit.put)
        self.look_up = LookUpStage(self.admission, decider, cast("Any", None), self.metrics, self.embed.put)

    def _resolve(self, resolved: Sequence[tuple[Delivery, Revised | Exception]]) -> None:
        self.ends |= {delivery.trace.id.removeprefix("kp:trace:"): end for delivery, end in resolved if delivery.trace}

    def submit(self, *objectives: str, **content: Any) -> None:
        for objective in objectives:
            trace_id = content.pop("trace_id", f"kp:trace:{objective.replace(' ', '-')}")
            delivery = Delivery(SimpleNamespace(headers={}), 0)
            delivery.trace = make_trace(objective=objective, trace_id=trace_id, **content)
            self.admission.submit(delivery)

    def texts_in_flight(self) -> float | None:
        return self.metrics.registry.get_sample_value("kp_scorer_texts_in_flight")

    def wait_for_texts(self, count: int) -> None:
        """Wait until ``count`` texts are in flight."""
        wait_until(lambda: self.texts_in_flight() == count)

    def wait_for_ends(self, count: int) -> Ends:
        wait_until(lambda: len(self.ends) == count)
        return self.ends

    def stop(self) -> None:
        self.admission.stop()
        self.look_up.thread.join(PATIENCE_S)
        self.embed.stop()
        self.commit.stop()
        for thread in (*self.embed.threads, self.commit.thread):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@contextmanager
def running(embedder: GatedEmbedder, group_size: int = 32) -> Iterator[Stages]:
    stages = Stages(embedder, group_size)
    try:
        yield stages
    finally:
        embedder.gate.release(1_000_000)
        stages.stop()


@contextmanager
def busy(embedder: GatedEmbedder, group_size: int = 32) -> Iterator[Stages]:
    """Run stages whose engine holds a first text, with all cores, until the gate opens."""
    with running(embedder, group_size) as stages:
        stages.submit("first")
        wait_until(lambda: embedder.passes == [(["first"], True)])
        yield stages


def test_a_lone_text_gets_all_cores_and_a_later_one_waits_for_no_other() -> None:
    with busy(embedder := GatedEmbedder()) as stages:
        stages.submit("a b c d e", "f g h i j k", "l")
        stages.wait_for_texts(4)
        assert len(embedder.passes) == 1, "its pass has all cores"
        embedder.gate.release()
        wait_until(lambda: len(embedder.passes) == 3)
        assert sorted(embedder.passes[1:]) == [(["a b c d e"], False), (["f g h i j k"], False)]
        embedder.gate.release()
        wait_until(lambda: len(embedder.passes) == 4)
        assert embedder.passes[3] == (["l"], False), "as soon as one stream is free"
        assert len(stages.wait_for_ends(2)) == 2, "and what is embedded is decided"


def test_texts_of_one_rounded_length_share_a_pass_and_the_oldest_goes_first() -> None:
    with busy(embedder := GatedEmbedder()) as stages:
        stages.submit("s1 x x", "long x x x x x x", "s2 x x", "s3 x x", "longer " + "x " * 20)
        stages.wait_for_texts(6)
        embedder.gate.release(1_000)
        stages.wait_for_ends(6)
    passes = [texts for texts, _ in embedder.passes[1:]]
    assert passes[0] == ["s1 x x", "s2 x x"], "a third would be too many tokens"
    assert [texts[0].split()[0] for texts in passes] == ["s1", "long", "s3", "longer"]


def test_texts_of_any_length_share_a_pass_where_the_engine_packs() -> None:
    embedder = GatedEmbedder(packs=True, most_passes=1)
    embedder.streams = 1
    with busy(embedder) as stages:
        stages.submit("a b c d e", "f g", "h i j k", "l")
        stages.wait_for_texts(5)
        embedder.gate.release(1_000)
        stages.wait_for_ends(5)
    assert [texts for texts, _ in embedder.passes[1:]] == [["a b c d e", "f g", "l"], ["h i j k"]]


def test_packed_texts_do_not_wait_for_the_pass_before() -> None:
    with running(embedder := GatedEmbedder(packs=True)) as stages:
        stages.submit("first")
        wait_until(lambda: embedder.passes == [(["first"], False)])
        stages.submit("second")
        wait_until(lambda: embedder.passes[1:] == [(["second"], False)])


def test_a_text_without_tokens_fails_alone_where_the_engine_packs() -> None:
    with running(GatedEmbedder(is_open=True, packs=True)) as stages:
        # While the lock is held, all three arrive, so that they are looked up together.
        with stages.admission._changed:
            stages.submit("good", "no-tokens", "fine")
        ends = stages.wait_for_ends(3)
    assert isinstance(ends.pop("no-tokens"), ValueError)
    assert all(isinstance(end, Decision) for end in ends.values())


def test_passes_wait_inside_the_engine_only_while_a_backlog_waits_behind_them() -> None:
    long = "x x x x x x"
    with busy(embedder := GatedEmbedder(most_passes=4)) as stages:
        stages.submit(*(f"t{n} {long}" for n in range(7)))
        stages.wait_for_texts(8)
        embedder.gate.release()
        wait_until(lambda: len(embedder.passes) == 5)
        assert stages.texts_in_flight() == 7, "three of them wait for no pass yet"
        embedder.gate.release()
        stages.wait_for_texts(6)
        assert len(embedder.passes) == 5, "of three the next waits for a stream"


def test_vectors_go_on_in_groups_only_while_a_backlog_waits() -> None:
    long = "x x x x x x"
    with busy(embedder := GatedEmbedder(), group_size=48) as stages:
        stages.submit(*(f"t{n} {long}" for n in range(40)))
        stages.wait_for_texts(41)
        embedder.gate.release(16)
        stages.wait_for_texts(25)
        ends = stages.wait_for_ends(16)
        assert {end.timings.batch_size for end in ends.values() if isinstance(end, Decision)} == {16}
        stages.ends.clear()
        embedder.gate.release(8)
        wait_until(lambda: len(embedder.passes) == 26)
        embedder.gate.release()
        ends = stages.wait_for_ends(9)
        batches = {end.timings.batch_size for end in ends.values() if isinstance(end, Decision)}
        assert batches == {9}, "eight were held back until no more than 15 waited"
        embedder.gate.release()
        stages.wait_for_ends(10)


def test_a_decision_says_how_much_of_its_text_was_embedded() -> None:
    with running(GatedEmbedder(is_open=True)) as stages:
        stages.submit("a b", "long a b")
        novelty = {name: end.novelty for name, end in stages.wait_for_ends(2).items() if isinstance(end, Decision)}
        assert (novelty["a-b"].embedded_tokens, novelty["a-b"].text_tokens) == (2, 2)
        assert (novelty["long-a-b"].embedded_tokens, novelty["long-a-b"].text_tokens) == (3, None)


def test_one_text_is_embedded_once_for_all_that_have_it() -> None:
    with busy(embedder := GatedEmbedder()) as stages:
        stages.submit("first", trace_id="kp:trace:2")
        stages.submit("other")
        stages.wait_for_texts(2)
        embedder.gate.release(1_000)
        stages.wait_for_ends(3)
    assert [texts for texts, _ in embedder.passes] == [["first"], ["other"]]


@pytest.mark.parametrize("poison", ["poison", "no-tokens"])
def test_a_poison_trace_fails_alone(poison: str) -> None:
    with busy(embedder := GatedEmbedder(fails_at="poison")) as stages:
        stages.submit("good", poison, "fine")
        stages.wait_for_texts(4 if poison == "poison" else 3)
        embedder.gate.release(1_000)
        ends = stages.wait_for_ends(4)
    assert isinstance(ends.pop(poison), ArithmeticError | ValueError)
    assert all(isinstance(end, Decision) for end in ends.values())


def test_traces_beyond_two_groups_are_not_leased() -> None:
    with running(embedder := GatedEmbedder(), group_size=4) as stages:
        stages.submit(*(f"text{n}" for n in range(30)))
        stages.wait_for_texts(8)
        wait_until(lambda: stages.look_up.thread.stall.elapsed_s() == 0)
        assert stages.texts_in_flight() == 8
        embedder.gate.release(1_000)
        assert all(isinstance(end, Decision) for end in stages.wait_for_ends(30).values())


def test_decided_traces_do_not_wait_for_the_engine() -> None:
    with running(embedder := GatedEmbedder()) as stages:
        stages.submit("decided")
        embedder.gate.release()
        first = dict(stages.wait_for_ends(1))
        stages.submit("slow")
        stages.wait_for_texts(1)
        stages.ends.clear()
        stages.submit("decided")
        assert stages.wait_for_ends(1) == first
        stages.ends.clear()
        stages.submit("conflicting", trace_id="kp:trace:decided")
        assert isinstance(stages.wait_for_ends(1)["decided"], TraceConflict)


@pytest.mark.parametrize(
    ("error", "fails_alone", "end"),
    [(ValueError("together"), False, Decision), (ServiceUnavailable("redis: away"), True, ServiceUnavailable)],
)
def test_a_group_that_cannot_be_committed_is_decided_one_by_one_except_in_an_outage(
    error: Exception, fails_alone: bool, end: type
) -> None:
    embedder = GatedEmbedder()
    embedder.max_tokens = 100
    with busy(embedder) as stages:
        stages.submit("a", "b", "c")
        stages.wait_for_texts(4)
        commit = stages.ledger.commit

        def failing(verdicts: Any) -> Any:
            if fails_alone or len(verdicts) > 1:
                raise error
            return commit(verdicts)

        stages.ledger.commit = failing  # type: ignore[method-assign]
        embedder.gate.release(1_000)
        assert all(isinstance(each, end) for each in stages.wait_for_ends(4).values())


def test_a_trace_that_is_decided_already_is_not_counted_again() -> None:
    def counted() -> float:
        samples = samples_of(generate_latest(stages.metrics.registry).decode())
        return sum(value for name, value in samples.items() if name.startswith("kp_scorer_values_total"))

    with running(GatedEmbedder(is_open=True)) as stages:
        stages.submit("first", "second")
        stages.wait_for_ends(2)
        wait_until(lambda: counted() == 2 * 6)
        stages.ends.clear()
        stages.submit("first", "third")
        stages.wait_for_ends(2)
        wait_until(lambda: counted() == 3 * 6)
