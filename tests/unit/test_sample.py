"""Which traces are sampled for review: an even share, by what no producer chooses, the same for whoever computes it."""

import hashlib
import json
from typing import Final

import pytest
from kp_scorer.decider import Decider, fraction_of
from kp_scorer.decision import Decision
from kp_scorer.ledger.records import MemoryLedger
from kp_scorer.offline import score_traces
from kp_scorer.scoring import Policy, decide_again
from kp_scorer.settings import load_settings

from tests.support.builders import make_trace, minimal_payload
from tests.support.word_embedder import word_decider

MANY: Final = 4_000


def decide(sample: float, count: int, *, is_embedding: bool = True) -> list[Decision]:
    without = Decider(MemoryLedger(), Policy(), None, max_attempts=5, sample=sample)
    decider = word_decider(sample=sample) if is_embedding else without
    resolved = decider.decide([make_trace(trace_id=f"kp:trace:{number}") for number in range(count)])
    assert decider.decide([make_trace(trace_id="kp:trace:0")]) == resolved[:1]
    return [each for each in resolved if isinstance(each, Decision)]


def test_by_default_nothing_is_sampled_and_the_message_is_as_it_was() -> None:
    (decision,) = score_traces([minimal_payload()], load_settings({"embedding.embedder": "none"}))
    assert decision.sampled is None
    assert "sampled" not in json.loads(decision.model_dump_json())


def test_an_even_share_is_sampled_with_its_probability_in_the_decision() -> None:
    fractions = [fraction_of(f"1767225600000-{number}") for number in range(MANY)]
    for share in (0.01, 0.2, 0.5):
        assert sum(each < share for each in fractions) / MANY == pytest.approx(share, abs=3 * (share / MANY) ** 0.5)
    assert 0 <= min(fractions) <= max(fractions) < 1
    decisions = decide(0.3, 200)
    assert {decision.sampled for decision in decisions} == {0.3, None}
    assert all(Decision.model_validate_json(decision.model_dump_json()) == decision for decision in decisions)
    assert {decide_again(decision, Policy(threshold=0.1)).sampled for decision in decisions} == {0.3, None}
    assert all(decision.sampled == 1 for decision in decide(1.0, 20))


@pytest.mark.parametrize("is_embedding", [True, False])
def test_the_place_decides_or_the_id_of_what_has_none_and_anybody_can_check_it(is_embedding: bool) -> None:
    for decision in decide(0.3, 100, is_embedding=is_embedding):
        text = decision.novelty.entry if is_embedding else decision.trace_id
        assert text is not None
        number = int(hashlib.blake2b(text.encode(), digest_size=6).hexdigest(), 16) / 2**48
        assert (decision.sampled is not None) == (number < 0.3)


def test_a_larger_share_has_all_of_a_smaller_one() -> None:
    few, more = ({each.trace_id for each in decide(share, 300) if each.sampled} for share in (0.1, 0.4))
    assert few < more
    assert load_settings({"review.sample": "0.25", "embedding.embedder": "none"}).review.sample == 0.25
