"""Scoring in process: in batches, with the decisions and the errors that scoring one by one gives."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kp_scorer import offline
from kp_scorer.decision import Decision
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.errors import EmbedderSick, InvalidTrace, TraceConflict
from kp_scorer.offline import decide_offline, offline_decider, score_traces
from kp_scorer.settings import Settings, load_settings

from tests.support.builders import make_trace, minimal_payload
from tests.support.traces import short_traces
from tests.support.word_embedder import WordEmbedder

WORDS = ("invoice", "ledger", "parcel")


class PoisonedEmbedder(WordEmbedder):
    """Cannot embed a text that says so, nor anything with it; embeds nothing at all once it is sick."""

    sick = False

    def __init__(self, *_: object) -> None:
        super().__init__()

    def embed(self, texts: Sequence[str]) -> Vectors:
        if self.sick or any("poison" in text for text in texts):
            raise ArithmeticError("poison")
        return super().embed(texts)


@pytest.fixture(autouse=True)
def _small_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "select_embedder", PoisonedEmbedder)


def batches_of(size: int) -> Settings:
    return load_settings({"worker.batch_size": size})


def told(decisions: Iterator[Decision]) -> list[object]:
    """What each decision says, and the error that came in the end, if one did."""
    found: list[object] = []
    try:
        for decision in decisions:
            said = decision.model_dump(exclude={"timings", "decided_at"})
            said["novelty"].pop("entry")
            found.append(said)
    except (InvalidTrace, TraceConflict, ArithmeticError, KeyError) as error:
        found.append(repr(error))
    return found


def payloads() -> st.SearchStrategy[list[Any]]:
    """Traces of few ids and few words, so that ids come again with the same content and with other; and what is no trace."""
    words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
    trace = st.builds(
        lambda number, objective: minimal_payload(trace_id=f"kp:trace:{number}", objective=objective), st.integers(0, 5), words
    )
    wrong = st.sampled_from([{}, minimal_payload(trace_id="kp:trace:poison", objective="poison")])
    return st.lists(st.one_of(trace, trace, trace, wrong), max_size=12)


@settings(deadline=None)
@given(payloads(), st.integers(2, 8))
def test_in_batches_each_trace_gets_what_it_gets_by_itself(traces: list[Any], size: int) -> None:
    assert told(score_traces(traces, batches_of(size))) == told(score_traces(traces, batches_of(1)))


def test_no_more_than_a_batch_is_taken_ahead() -> None:
    taken = 0

    def source() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for trace in short_traces(20, seed=1):
            taken += 1
            yield trace

    ahead = [taken - number for number, _ in enumerate(score_traces(source(), batches_of(8)))]
    assert ahead == [8, 7, 6, 5, 4, 3, 2, 1] * 2 + [4, 3, 2, 1]


def test_an_error_of_the_source_comes_after_what_it_gave() -> None:
    traces = short_traces(5, seed=2)

    def source() -> Iterator[dict[str, Any]]:
        yield from traces
        raise KeyError("the source")

    assert told(score_traces(source(), batches_of(3))) == [*told(score_traces(traces, batches_of(1))), "KeyError('the source')"]


def test_nothing_to_score_gives_nothing() -> None:
    assert list(score_traces([], batches_of(3))) == []


def test_a_text_that_cannot_be_embedded_takes_none_before_it_along() -> None:
    traces = [make_trace(trace_id=f"kp:trace:{number}", objective=f"{WORDS[number % 3]} {number}") for number in range(4)]
    poison = make_trace(trace_id="kp:trace:poison", objective="poison")
    decided = decide_offline(offline_decider(batches_of(8)), [*traces[:2], poison, *traces[2:]])
    assert [found.trace_id for _, found in zip(range(2), decided, strict=False)] == ["kp:trace:0", "kp:trace:1"]
    with pytest.raises(ArithmeticError):
        next(decided)


def test_a_sick_embedder_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decider = offline_decider(batches_of(8))
    monkeypatch.setattr(PoisonedEmbedder, "sick", True)
    with pytest.raises(EmbedderSick):
        next(decide_offline(decider, [make_trace(trace_id="kp:trace:0"), make_trace(trace_id="kp:trace:1")]))
