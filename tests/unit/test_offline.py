"""Scoring in process works in batches, and gives the decisions and errors that scoring one by one gives."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer import offline
from kp_scorer.decision import Decision
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.errors import EmbedderUnhealthy, InvalidTrace, NotConverted, SettingsError, TraceConflict, TraceDead
from kp_scorer.offline import Scorer, convert, decide_offline, offline_decider, score_traces
from kp_scorer.settings import Settings, load_settings

from tests.support.builders import make_trace, minimal_payload
from tests.support.calls import traced_memory
from tests.support.traces import short_traces
from tests.support.word_embedder import WordEmbedder

WORDS = ("invoice", "ledger", "parcel")


class PoisonedEmbedder(WordEmbedder):
    """An embedder that fails on a batch with the word "poison", and on everything while ``unhealthy``."""

    unhealthy = False

    def __init__(self, *_: object) -> None:
        super().__init__()

    def embed(self, texts: Sequence[str]) -> Vectors:
        if self.unhealthy or any("poison" in text for text in texts):
            raise ArithmeticError("poison")
        return super().embed(texts)


@pytest.fixture(autouse=True)
def _small_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "select_embedder", PoisonedEmbedder)


def batches_of(size: int) -> Settings:
    return load_settings({"worker.concurrency": 3 * size})


def outcomes(decisions: Iterator[Decision]) -> list[object]:
    """Return each decision without its times and its place in the log, and then the error that ended them, if any."""
    rows: list[object] = []
    try:
        for decision in decisions:
            row = decision.model_dump(exclude={"timings", "decided_at"})
            row["novelty"].pop("entry")
            rows.append(row)
    except (InvalidTrace, TraceConflict, TraceDead, KeyError) as error:
        rows.append(repr(error))
    return rows


def payloads() -> st.SearchStrategy[list[Any]]:
    """Return a strategy for lists of traces whose ids recur, with the same or with other content, and of invalid traces."""
    words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
    trace = st.builds(
        lambda number, objective: minimal_payload(trace_id=f"kp:trace:{number}", objective=objective), st.integers(0, 5), words
    )
    wrong = st.sampled_from([{}, minimal_payload(trace_id="kp:trace:poison", objective="poison")])
    return st.lists(st.one_of(trace, trace, trace, wrong), max_size=12)


@given(payloads(), st.integers(2, 8))
def test_batches_decide_each_trace_as_it_is_decided_alone(traces: list[Any], size: int) -> None:
    assert outcomes(score_traces(traces, batches_of(size))) == outcomes(score_traces(traces, batches_of(1)))


def test_at_most_one_batch_is_read_ahead() -> None:
    read = 0

    def source() -> Iterator[dict[str, Any]]:
        nonlocal read
        for trace in short_traces(20, seed=1):
            read += 1
            yield trace

    ahead = [read - number for number, _ in enumerate(score_traces(source(), batches_of(8)))]
    assert ahead == [8, 7, 6, 5, 4, 3, 2, 1] * 2 + [4, 3, 2, 1]


def test_error_of_the_source_follows_the_decisions_on_earlier_traces() -> None:
    traces = short_traces(5, seed=2)

    def source() -> Iterator[dict[str, Any]]:
        yield from traces
        raise KeyError("the source")

    assert outcomes(score_traces(source(), batches_of(3))) == [
        *outcomes(score_traces(traces, batches_of(1))),
        "KeyError('the source')",
    ]


def test_unhealthy_embedder_ends_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    decider = offline_decider(batches_of(8))
    monkeypatch.setattr(PoisonedEmbedder, "unhealthy", True)
    with pytest.raises(EmbedderUnhealthy):
        next(decide_offline(decider, [make_trace(trace_id="kp:trace:0"), make_trace(trace_id="kp:trace:1")]))


def test_a_scorer_keeps_its_window_from_call_to_call() -> None:
    traces = short_traces(12, seed=3)
    scorer = Scorer(batches_of(8))
    rows = outcomes(scorer.score(trace) for trace in traces)
    assert rows == outcomes(score_traces(traces, batches_of(1)))
    assert scorer.score(traces[0]) == scorer.score(traces[0])
    with pytest.raises(TraceConflict):
        scorer.score(traces[1] | {"id": traces[0]["id"]})
    with pytest.raises(InvalidTrace):
        scorer.score({})


def test_how_new_changes_nothing() -> None:
    scorer, text = Scorer(batches_of(8)), "count the parcels"
    assert scorer.how_new(text) == 0.5
    scorer.score(minimal_payload(trace_id="kp:trace:1", objective=text))
    assert scorer.how_new(text) < 0.1 < scorer.how_new("bake a cake")
    second = scorer.score(
        minimal_payload(trace_id="kp:trace:2", objective="bake a cake", steps=[{"step_id": 0, "type": "thought"}])
    )
    before = scorer.how_new("bake a cake")
    assert second.novelty.nearest is not None
    assert second.novelty.nearest.trace_id == "kp:trace:1"
    assert scorer.how_new("bake a cake") == before < 0.1


def test_a_success_is_compared_only_with_successes_if_the_settings_say_so() -> None:
    runs = [(False, 0.9), (True, 0.49), (False, 0.4), (True, 0.5), (True, 0.9), (False, 0.9)]
    traces = [
        minimal_payload(trace_id=f"kp:trace:{place}", objective="pay the invoice", success=success, confidence=confidence)
        for place, (success, confidence) in enumerate(runs)
    ]
    changed = {"novelty.against": "succeeded"}
    scorer = Scorer(load_settings(changed))
    decisions = [scorer.score(trace) for trace in traces[:3]]
    assert scorer.how_new("pay the invoice") == 0.5
    decisions += [scorer.score(trace) for trace in traces[3:]]
    compared = [decision.novelty.nearest is not None for decision in decisions]
    assert compared == [False, True, True, False, True, True]
    assert (decisions[3].dimensions.novelty, decisions[3].novelty.source) == (0.5, "empty_cache")
    nearest = decisions[4].novelty.nearest
    assert nearest
    assert nearest.trace_id == "kp:trace:3"
    assert scorer.how_new("pay the invoice") < 0.1
    assert outcomes(iter(decisions)) == outcomes(score_traces(traces, load_settings(changed)))


def test_memory_is_bounded_by_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kp_scorer.settings.sections.SLACK_ELEMENTS", 40)
    scorer = Scorer(load_settings({"novelty.max_elements": 20}))

    def growth_bytes(first: int, end: int) -> int:
        with traced_memory() as memory:
            for number in range(first, end):
                scorer.score(make_trace(trace_id=f"kp:trace:{number}", objective=f"task {number % 40}"))
        return memory.held_bytes

    # The first traces fill the window and its slack, so that from now on new allocations only replace earlier ones.
    growth_bytes(0, 400)
    # If memory grew with every trace, twice the traces would take twice as much; chance allocations make up to a quarter.
    assert growth_bytes(400, 800) < 1.5 * growth_bytes(800, 1_000)
    # Within the window and its slack a trace is recognised.
    repeated = make_trace(trace_id="kp:trace:960", objective="task 0")
    assert scorer.score(repeated).novelty.entry == scorer.score(repeated).novelty.entry


def test_logs_of_other_tools_are_converted_and_scored_in_process() -> None:
    chat = {
        "messages": [{"role": "user", "content": "count the parcels"}, {"role": "assistant", "content": "there are three"}],
        "created": 1_767_225_600,
        "score": 0.9,
    }
    supplied: dict[str, Any] = {"domain": "code", "success": True, "paths": {"confidence": "score"}}
    # The chat comes second, because a chat is returned only once no later one is likely to continue it.
    refused, trace = convert([chat, {"nothing": "known"}], **supplied)
    assert isinstance(refused, NotConverted)
    assert refused.line == 2
    assert not isinstance(trace, NotConverted)
    decision = Scorer(batches_of(8)).score(trace)
    assert (decision.domain, decision.visibility, decision.dimensions.outcome_confidence) == ("code", "private", 0.9)


def test_an_unknown_format_raises_an_error_that_names_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"^format_name: expected one of amazon-q, .*, got 'chats'$"):
        next(convert([{}], format_name="chats"))
