"""What a trace says: its digest, the text that is embedded, and that neither can change."""

import random
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decoding import decode_trace
from pydantic import ValidationError

from tests.support.builders import (
    LIMITS,
    Payload,
    changed,
    keys_of,
    make_trace,
    maximal_payload,
    minimal_payload,
    step,
    steps,
    without,
)

UNREAD: Final = {"@context", "@type", "id", "metadata.created_at", "metadata.quality_score", "metadata.quality_threshold"}
CHOICES: Final[dict[str, list[object]]] = {
    "metadata.task_domain": ["code", "else"],
    "metadata.visibility": ["private", "org"],
    "metadata.privacy_level": ["federated", "private"],
    "steps.0.type": ["thought", "observation", "error_recovery"],
    "steps.1.type": ["thought", "tool_call", "error_recovery"],
    "metadata.success": [False],
    "outcome.confidence": [0.0, 0.5, 0.95, 1.0],
    "steps.0.step_id": [1, 7],
    "steps.1.step_id": [0, 7],
    "steps.0.latency_ms": [0, 13, 12.25],
}


def digest(payload: Payload) -> bytes:
    return decode_trace(payload, LIMITS).digest()


def leaves(value: object, path: str = "") -> list[str]:
    """Dotted paths of everything that holds no more parts."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, f"{path}.{index}")]
    return [path]


def shuffled(value: Any, shuffle: random.Random) -> Any:
    """The same JSON with the keys of every object in another order."""
    if isinstance(value, dict):
        keys = list(value)
        shuffle.shuffle(keys)
        return {key: shuffled(value[key], shuffle) for key in keys}
    return [shuffled(item, shuffle) for item in value] if isinstance(value, list) else value


SAYING: Final = [leaf for leaf in leaves(maximal_payload()) if leaf not in UNREAD]


def test_digest_has_sixteen_bytes() -> None:
    assert len(digest(minimal_payload())) == 16


@given(st.randoms(use_true_random=False))
def test_digest_does_not_depend_on_the_order_of_keys(shuffle: random.Random) -> None:
    assert digest(shuffled(maximal_payload(), shuffle)) == digest(maximal_payload())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "kp:trace:other"),
        ("metadata.created_at", "2031-05-05T10:00:00+02:00"),
        ("metadata.quality_score", 1.0),
        ("metadata.quality_score", None),
        ("unknown", "ignored"),
        ("metadata.unknown", {"ignored": True}),
    ],
)
def test_digest_does_not_depend_on_what_says_nothing(path: str, value: object) -> None:
    assert digest(changed(maximal_payload(), path, value)) == digest(maximal_payload())


@pytest.mark.parametrize("path", ["steps.1.content", "source_skill", "metadata.agent_id", "knowledge_graph_delta"])
def test_missing_field_says_the_same_as_null(path: str) -> None:
    payload = maximal_payload()
    missing = without(payload, path)
    assert digest(missing) == digest(changed(payload, path, None))
    assert digest(missing) != digest(payload)


@given(st.data(), st.sampled_from(SAYING))
def test_digest_depends_on_everything_that_says_something(data: st.DataObject, path: str) -> None:
    payload = maximal_payload()
    value: Any = payload
    for key in keys_of(path):
        value = value[key]
    if path in CHOICES:
        other = data.draw(st.sampled_from(CHOICES[path]))
    elif isinstance(value, str):
        other = value + data.draw(st.text("abc é\n", min_size=1, max_size=3))
    else:
        other = data.draw(st.sampled_from(["else", 3, [1], {}]))
    assert digest(changed(payload, path, other)) != digest(payload)


def test_digest_depends_on_the_order_of_steps() -> None:
    one, other = (minimal_payload(steps=steps(*types)) for types in (["thought", "tool_call"], ["tool_call", "thought"]))
    assert digest(one) != digest(other)


def test_digest_tells_empty_content_from_none() -> None:
    assert digest(minimal_payload(steps=[step("thought", content="")])) != digest(minimal_payload(steps=[step("thought")]))


def test_embedded_text_is_the_objective_and_every_content_single_spaced() -> None:
    silent = step("tool_call", "sql", input={"query": "x"}, output_summary="a row")
    said = [step("thought", content="one"), silent, step("observation", content="two  three ")]
    assert make_trace(objective="do it", steps=said).embedding_text == "do it one  two  three "


def test_embedded_text_of_a_trace_without_content_ends_in_a_space_a_step() -> None:
    assert make_trace(objective="do it", steps=steps("thought", "thought")).embedding_text == "do it  "


@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_embedded_text_holds_all_contents_in_order(contents: list[str | None]) -> None:
    trace = make_trace(objective="go", steps=[step("thought", content=content) for content in contents])
    assert trace.embedding_text == "go" + "".join(f" {content or ''}" for content in contents)


def test_what_was_done_is_calls_then_thoughts_and_recoveries_each_in_order() -> None:
    said = [
        step("thought", content="think"),
        step("observation", content="see"),
        step("tool_call", "sql", content="select"),
        step("error_recovery", content="again"),
        step("tool_call", "sql", content=""),
        step("tool_call", "sql", content="count"),
    ]
    assert make_trace(steps=said).did == "select count think again"


@pytest.mark.parametrize("calls", [[], [step("tool_call", "sql", content="  ")]])
def test_where_nothing_is_said_to_be_done_all_contents_stand_for_it(calls: list[Any]) -> None:
    seen = [step("observation", content="one"), step("observation"), step("observation", content="two")]
    assert make_trace(steps=[*calls, *seen]).did == " ".join([*("  " for _ in calls), "one", "two"])


@pytest.mark.parametrize("path", ["id", "metadata.success", "task.objective", "outcome.confidence", "steps"])
def test_trace_cannot_be_changed(path: str) -> None:
    part: Any = decode_trace(maximal_payload(), LIMITS)
    *outer, last = path.split(".")
    for name in outer:
        part = getattr(part, name)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(part, last, "changed")


def test_steps_of_a_trace_cannot_be_replaced() -> None:
    trace: Any = decode_trace(maximal_payload(), LIMITS)
    with pytest.raises(TypeError):
        trace.steps[0] = trace.steps[1]


@pytest.mark.parametrize(
    ("payload", "by_0_1_0"),
    [
        (minimal_payload(), "5a65a37e784d676051a4727af51d255b"),
        (maximal_payload(), "69dadeffaaa2542cc9fb2645ac232157"),
        (
            changed(
                changed(minimal_payload(), "task.objective", 'Größe prüfen: 你好 \U0001f600\u2028 "\\\n'),
                "outcome.result_summary",
                "",
            ),
            "8e7142e813226fd06c025befdb72356b",
        ),
        (
            minimal_payload(
                confidence=0.1,
                steps=[
                    step(
                        "tool_call",
                        "sql",
                        input={"b": [1, 1.0, -0.0, 1e22, 1e-7, 2**70], "a": {"é": None, "": True}},
                        latency_ms=3,
                    )
                ],
            ),
            "269e03d55797b12773bb41ace8c30d40",
        ),
        (minimal_payload(steps=[step("thought", content=""), step("tool_call", "")]), "7eb2ff8b1e30712dcd1e32e93da06ef8"),
    ],
    ids=["minimal", "maximal", "other scripts", "numbers", "empty texts"],
)
def test_digest_stays_what_it_is_from_version_to_version(payload: Payload, by_0_1_0: str) -> None:
    # Where this fails, workers of two versions on one queue take each other's traces for conflicts.
    assert digest(payload).hex() == by_0_1_0
