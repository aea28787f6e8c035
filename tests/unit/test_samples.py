"""The sample traces that come with the package show everything the scorer can say."""

from collections import Counter
from importlib import resources

import pytest
from kp_scorer.decoding import decode_json
from kp_scorer.scoring import Policy, score
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import BUILT_IN_DOMAINS, LIMITS


@pytest.fixture(scope="module")
def samples() -> list[ReasoningTrace]:
    raw = resources.files("kp_scorer.samples").joinpath("traces.jsonl").read_bytes()
    return [decode_json(line, LIMITS) for line in raw.splitlines()]


def test_there_are_at_least_forty_samples_each_under_an_id_of_its_own(samples: list[ReasoningTrace]) -> None:
    assert len(samples) >= 40
    assert len({trace.id for trace in samples}) == len(samples)


@pytest.mark.parametrize("domain", BUILT_IN_DOMAINS)
def test_samples_cover_the_profile(samples: list[ReasoningTrace], domain: str) -> None:
    assert any(trace.metadata.task_domain == domain for trace in samples)


def test_samples_cover_domains_without_a_profile(samples: list[ReasoningTrace]) -> None:
    assert {trace.metadata.task_domain for trace in samples} - {*BUILT_IN_DOMAINS, "default"}


def test_samples_cover_success_and_failure(samples: list[ReasoningTrace]) -> None:
    assert {trace.metadata.success for trace in samples} == {True, False}


def test_some_samples_repeat_another_word_for_word(samples: list[ReasoningTrace]) -> None:
    times = Counter(trace.digest() for trace in samples)
    assert max(times.values()) > 1
    assert len(times) > len(samples) / 2


@pytest.mark.parametrize("name", ["single_thought", "recovered_from_errors", "single_tool"])
def test_override_fires_in_some_sample(samples: list[ReasoningTrace], name: str) -> None:
    assert any(override.name == name for trace in samples for override in score(trace, 0.9, Policy()).overrides)


def test_new_samples_are_accepted_and_rejected(samples: list[ReasoningTrace]) -> None:
    policy = Policy()
    accepted = {score(trace, 0.9, policy).value >= policy.threshold for trace in samples}
    assert accepted == {True, False}
