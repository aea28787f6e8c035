"""Decisions as flat rows, and as tables of pandas and polars."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, get_args, get_type_hints

import pandas as pd
import polars as pl
import pytest
from kp_scorer import Decision, Row, rows, score_traces
from kp_scorer.decision import FiredOverride, Nearest, Novelty, Timings
from kp_scorer.settings import Settings, load_settings

from tests.support.builders import decision_on
from tests.support.traces import sample_traces

WITHOUT_EMBEDDER: Final[Settings] = load_settings({"embedding.embedder": "none"})
PLAIN: Final = Decision.model_validate_json(decision_on("kp:trace:plain"))
FULL: Final = PLAIN.model_copy(
    update={
        "trace_id": "kp:trace:full",
        "domain": "law",
        "taken_for": "legal",
        "outcome": "review",
        "score": 0.61,
        "threshold": 0.72,
        "threshold_source": "submission",
        "review": 0.53,
        "profile": "justice",
        "dimensions": PLAIN.dimensions.model_copy(
            update={"complexity": 0.11, "novelty": 0.12, "tool_diversity": 0.13, "outcome_confidence": 0.14}
        ),
        "weights": PLAIN.weights.model_copy(
            update={"complexity": 0.21, "novelty": 0.22, "tool_diversity": 0.23, "outcome_confidence": 0.34}
        ),
        "composite": 0.62,
        "overrides": (FiredOverride(name="recovered_from_errors", score=0.61), FiredOverride(name="single_tool", score=0.61)),
        "novelty": Novelty(
            source="embedding",
            nearest=Nearest(trace_id="kp:trace:near", similarity=0.88),
            duplicate_of="kp:trace:first",
            embedder="MiniLM",
            space="0123456789abcdef",
            entry="1767225600000-7",
        ),
        "timings": Timings(look_up_ms=1.5, embed_ms=2.5, place_ms=3.5, batch_size=9),
        "decided_at": "2026-03-04T05:06:07.890+02:00",
    }
)


def leaves(value: Any) -> Iterator[Any]:
    """What stands at the ends of nested dicts."""
    if isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def test_a_row_has_all_that_a_decision_says() -> None:
    (row,) = rows([FULL])
    said = set(leaves(FULL.model_dump(exclude={"schema_version", "overrides", "decided_at"})))
    assert said == set(row) - {True, False, row.decided_at}
    assert (row.single_thought, row.recovered_from_errors, row.single_tool) == (False, True, True)
    assert row.decided_at == datetime(2026, 3, 4, 3, 6, 7, 890_000, tzinfo=UTC)
    assert row.decided_at.tzinfo is UTC


def test_dimensions_and_their_weights_are_not_mixed_up() -> None:
    (row,) = rows([FULL])
    for name, value in FULL.dimensions.model_dump().items():
        assert getattr(row, name) == value
        assert getattr(row, f"{name}_weight") == getattr(FULL.weights, name)
    assert (row.nearest_id, row.similarity, row.duplicate_of) == ("kp:trace:near", 0.88, "kp:trace:first")
    assert (row.score, row.composite, row.threshold, row.review) == (0.61, 0.62, 0.72, 0.53)


def test_every_row_is_of_the_same_types() -> None:
    hints = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Row).items()}
    found = rows([FULL, PLAIN, *score_traces(sample_traces(), WITHOUT_EMBEDDER)])
    assert len(found) == 2 + len(sample_traces())
    for row in found:
        assert {name for name, value in row._asdict().items() if type(value) not in hints[name]} == set()


def test_rows_keep_the_order_and_the_decisions_as_they_are() -> None:
    before = FULL.model_dump()
    assert [row.trace_id for row in rows(iter([FULL, PLAIN, FULL]))] == ["kp:trace:full", "kp:trace:plain", "kp:trace:full"]
    assert FULL.model_dump() == before


# More rows without a value, at first, than polars looks at by itself to tell a column's type.
MANY: Final = [*[PLAIN] * 150, FULL]


def test_pandas_takes_rows_as_they_are() -> None:
    table = pd.DataFrame(rows(MANY))
    assert list(table.columns) == list(Row._fields)
    assert len(table) == len(MANY)
    assert (table["score"].dtype, table["single_tool"].dtype, table["batch_size"].dtype) == ("float64", "bool", "int64")
    assert str(table["decided_at"].dtype).startswith("datetime64[")
    assert str(table["decided_at"].dtype).endswith(", UTC]")
    assert table["review"].isna().sum() == 150
    assert table["nearest_id"].iloc[-1] == "kp:trace:near"


def test_polars_takes_rows_as_they_are() -> None:
    table = pl.DataFrame(rows(MANY))
    assert table.columns == list(Row._fields)
    assert table.height == len(MANY)
    assert {table.schema[name] for name in ("trace_id", "outcome", "nearest_id", "duplicate_of")} == {pl.String()}
    assert {table.schema[name] for name in ("score", "review", "similarity", "embed_ms")} == {pl.Float64()}
    assert (table.schema["single_tool"], table.schema["batch_size"]) == (pl.Boolean(), pl.Int64())
    assert isinstance(table.schema["decided_at"], pl.Datetime)
    assert table["decided_at"][-1] == datetime(2026, 3, 4, 3, 6, 7, 890_000)
    assert table["nearest_id"].null_count() == 150


def test_columns_have_their_types_also_where_no_row_has_a_value() -> None:
    assert pl.DataFrame(rows([PLAIN])).schema == pl.DataFrame(rows([FULL])).schema


def test_a_time_that_is_none_is_no_row() -> None:
    with pytest.raises(ValueError, match="isoformat"):
        rows([PLAIN.model_copy(update={"decided_at": "yesterday"})])
