"""Whatever is submitted, decoding it gives a trace that can be scored, or the one decode error, which quotes nothing of it."""

import json
import math
import random
import traceback
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

import numpy as np
import pytest
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import InvalidTrace
from kp_scorer.scoring import Policy, score
from kp_scorer.trace import ReasoningTrace

from tests.fuzz.mutations import NUMBER_MARK, SEED, TEXT_MARK, base_texts, damaged, mutated_payload
from tests.support.builders import LIMITS, decode_json, maximal_payload

POLICY: Final = Policy()
COUNT: Final = 5_000


def test_mutated_submissions_are_scored_or_refused_by_the_decode_error() -> None:
    bases = base_texts()
    outcomes: Counter[str] = Counter()
    for number in range(COUNT):
        chance = random.Random(f"{SEED}:{number}")
        try:
            outcomes[_submit(chance, chance.choice(bases))] += 1
        except Exception as error:
            raise AssertionError(f"FUZZ_SEED={SEED}, submission {number}: {type(error).__name__}") from error
    # If nothing were valid, or nothing invalid, this would test nothing.
    assert outcomes["scored"] > COUNT / 10
    assert len(outcomes) > 100


@pytest.mark.parametrize(
    "value",
    [datetime.now(UTC), Decimal("1.5"), b"bytes", {1, 2}, 1j, object(), {(1, 2): 3}, {b"key": 1}],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_does_not_have_are_refused_by_the_name_of_their_field(value: object) -> None:
    payload = maximal_payload()
    payload["steps"][0]["input"]["odd"] = [value]
    with pytest.raises(InvalidTrace, match=r"^steps\.0\.input: expected only what JSON has"):
        decode_trace(payload, LIMITS)
    with pytest.raises(InvalidTrace, match=r"^\$: expected only what JSON has"):
        decode_trace(maximal_payload() | {"a secret": value}, LIMITS)


def test_a_scalar_of_numpy_is_refused_by_the_name_of_its_field() -> None:
    payload = maximal_payload()
    payload["outcome"]["confidence"] = np.float32(0.5)
    with pytest.raises(InvalidTrace, match=r"^outcome\.confidence: expected only what JSON has"):
        decode_trace(payload, LIMITS)


def test_a_list_that_holds_itself_is_too_deep() -> None:
    payload = maximal_payload()
    itself: list[object] = []
    itself.append(itself)
    payload["steps"][0]["input"]["odd"] = itself
    with pytest.raises(InvalidTrace, match=r"^\$: expected nesting of at most 32$"):
        decode_trace(payload, LIMITS)


def _submit(chance: random.Random, base: str) -> str:
    """Submit one mutated trace, as bytes or parsed; return how it ended."""
    novelty = chance.choice((0.0, 0.5, 1.0, chance.random()))
    try:
        trace = _decode(chance, base)
    except InvalidTrace as error:
        message = str(error)
        assert message
        texts = [message, *(f"{problem.field}: {problem.expected}" for problem in error.problems)]
        assert max(map(len, texts)) < 1_000
        for text in (*texts, repr(error), *traceback.format_exception(error, limit=0)):
            assert TEXT_MARK not in text
            assert NUMBER_MARK not in text
        return message
    _check_that_it_can_be_scored(trace, novelty)
    return "scored"


def _decode(chance: random.Random, base: str) -> ReasoningTrace:
    if chance.random() < 0.2:
        return decode_json(damaged(chance, base.encode()), LIMITS)
    payload = mutated_payload(chance, base)
    if chance.random() < 0.5:
        return decode_trace(payload, LIMITS)
    try:
        raw = json.dumps(payload, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        # This payload cannot be written as JSON, so a producer could only pass it parsed.
        return decode_trace(payload, LIMITS)
    return decode_json(damaged(chance, raw) if chance.random() < 0.3 else raw, LIMITS)


def _check_that_it_can_be_scored(trace: ReasoningTrace, novelty: float) -> None:
    scored = score(trace, novelty, POLICY)
    parts = scored.dimensions
    for figure in (scored.score, scored.composite, *parts.model_dump().values()):
        assert math.isfinite(figure)
        assert 0 <= figure <= 1
    # A decision also needs the text to embed and the digest, and the trace must survive a round trip through JSON.
    trace.embedding_text.encode()
    assert len(trace.digest()) == 16
    assert decode_json(trace.model_dump_json(exclude_none=True).encode(), LIMITS) == trace
