"""Decisions of other versions can be read, rows become tables of pandas and polars, and an audit judges each decision."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, get_args, get_type_hints

import numpy as np
import pytest
from kp_scorer import Decision, Row, rows, score_traces
from kp_scorer.novelty import Window
from kp_scorer.novelty.log import Entry, Place
from kp_scorer.novelty.verification import DecidedTrace, Difference, Report, audit
from kp_scorer.settings import Settings, load_settings
from pydantic import ValidationError

from tests.support.builders import COMPLETE_DECISION, decision, decision_on, make_trace
from tests.support.traces import sample_traces
from tests.support.word_embedder import WordEmbedder, decide_one, word_decider


def later(value: Any) -> Any:
    """Return the same JSON with an additional field in every object, as a later version may write it."""
    if isinstance(value, dict):
        return {"later": {"deep": [1]}} | {name: later(part) for name, part in value.items()}
    return [later(part) for part in value] if isinstance(value, list) else value


def test_a_complete_decision_is_read_and_unknown_fields_anywhere_are_ignored() -> None:
    written = json.loads(COMPLETE_DECISION)
    read = Decision.model_validate(later(written)).model_dump(mode="json")
    assert {name: read[name] for name in written} == written
    assert read.keys() <= Decision.model_fields.keys()


def test_a_decision_of_another_schema_is_refused() -> None:
    with pytest.raises(ValidationError, match="schema_version"):
        Decision.model_validate(json.loads(COMPLETE_DECISION) | {"schema_version": 2})


def test_by_default_a_message_mentions_no_guards_sample_checks_or_pins() -> None:
    (by_settings,) = score_traces(sample_traces()[:1], load_settings({"embedding.embedder": "words"}))
    by_policy = decide_one(word_decider(embedder=(embedder := WordEmbedder())), make_trace())
    for decided in (by_settings, by_policy):
        assert not {"guards", "sampled", "checks", "pinned"} & json.loads(decided.model_dump_json()).keys()
    assert len(embedder.texts) == 1, "no objective is embedded by itself"


WITHOUT_EMBEDDER: Final[Settings] = load_settings({"embedding.embedder": "none"})
PLAIN: Final = Decision.model_validate_json(decision_on("kp:trace:plain"))
FULL: Final = Decision.model_validate_json(COMPLETE_DECISION)


def test_row_has_every_value_of_a_decision_by_its_name() -> None:
    before = FULL.model_dump()
    _, row = rows(iter([PLAIN, FULL]))
    dumped = FULL.model_dump(exclude={"schema_version", "overrides", "decided_at"})
    nested = {name: value for part in ("novelty", "received", "timings") for name, value in dumped.pop(part).items()}
    del dumped["dimensions"], dumped["weights"]
    nearest = nested.pop("nearest")
    assert nested.pop("source") == row.novelty_source
    assert dumped | nested | {"nearest_id": nearest["trace_id"], "similarity": nearest["similarity"]} == {
        name: value for name, value in row._asdict().items() if name in {*dumped, *nested, "nearest_id", "similarity"}
    }
    assert (row.single_thought, row.recovered_from_errors, row.single_tool) == (False, True, True)
    assert row.decided_at == datetime(2026, 3, 4, 3, 6, 7, 890_000, tzinfo=UTC)
    assert row.decided_at.tzinfo is UTC
    assert FULL.model_dump() == before
    for name, value in FULL.dimensions.model_dump().items():
        assert getattr(row, name) == value
        assert getattr(row, f"{name}_weight") == getattr(FULL.weights, name)


def test_every_row_is_of_the_same_types() -> None:
    hints = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Row).items()}
    table = rows([FULL, PLAIN, *score_traces(sample_traces(), WITHOUT_EMBEDDER)])
    assert len(table) == 2 + len(sample_traces())
    for row in table:
        assert {name for name, value in row._asdict().items() if type(value) not in hints[name]} == set()


# At first, more rows lack a value than polars inspects by default to infer a column's type.
MANY: Final = [*[PLAIN] * 150, FULL]


def test_polars_reads_rows_unchanged() -> None:
    # Importing polars takes seconds. At the top of the file, every process of the suite would spend them when it collects
    # tests.
    import polars as pl

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
    import polars as pl

    assert pl.DataFrame(rows([PLAIN])).schema == pl.DataFrame(rows([FULL])).schema


ENTRY = Entry(Place.parse("1000-1"), "kp:trace:1", b"a" * 16, np.eye(1, 8, dtype=np.float32)[0])


def resting_on(entry: str, novelty: float) -> Decision:
    """Return a decision on the trace of ``ENTRY`` that claims this place in the log and this novelty."""
    made = decision(ENTRY.trace_id, novelty=novelty)
    return made.model_copy(update={"novelty": made.novelty.model_copy(update={"entry": entry})})


def audited(novelty: float, digest: bytes, entry: str = "1000-1") -> Report:
    """Return the audit of a decision with these values, against a log that holds only ``ENTRY``."""
    decided = DecidedTrace(resting_on(entry, novelty), digest)
    return audit([ENTRY], lambda ids: [decided], Window(10, 60_000, 0, 0), lambda done, total: None)


@pytest.mark.parametrize(("novelty", "is_of_other_content"), [(0.5, False), (0.123, False), (0.5, True)])
def test_a_decision_rests_on_an_entry_of_its_own_content(novelty: float, is_of_other_content: bool) -> None:
    report = audited(novelty, b"b" * 16 if is_of_other_content else ENTRY.digest)
    agrees = novelty == 0.5 and not is_of_other_content
    assert (report.entries, report.agreeing, report.undecided) == (1, int(agrees), 0)
    difference = Difference(ENTRY.trace_id, "1000-1", novelty, 0.5, is_of_other_content)
    assert report.differences == ([] if agrees else [difference])


def test_entries_after_a_place_are_audited_against_windows_that_begin_before_it() -> None:
    log = [Entry(Place(1_000, number), f"kp:trace:{number}", bytes([number] * 16), ENTRY.vector) for number in (1, 2, 3, 4)]
    # All entries have the same vector, so all but the first are repeats without novelty. The last is not decided yet.
    decided = {entry.trace_id: DecidedTrace(resting_on(str(entry.place), 0.0), entry.digest) for entry in log[:3]}

    def since(place: str, entries: Sequence[Entry] = log) -> Report:
        window = Window(10, 60_000, 0, 0)
        return audit(
            entries, lambda ids: list(map(decided.get, ids)), window, lambda done, total: None, since=Place.parse(place)
        )

    assert [each.trace_id for each in since("0-0").differences] == ["kp:trace:1"]
    later = since("1000-1")
    assert (later.entries, later.agreeing, later.undecided, later.last) == (3, 2, 1, Place(1_000, 3))
    nothing = since(str(later.last))
    assert (nothing.entries, nothing.agreeing, nothing.last) == (1, 0, None)
    # Damaged entries that lie before the place are not counted either.
    damaged = [log[0]._replace(trace_id=""), log[1], log[2]._replace(trace_id="")]
    assert [since(place, damaged).damaged for place in ("0-0", "1000-1", "1000-3")] == [2, 1, 0]


def test_a_decision_that_rests_on_another_entry_is_not_compared_with_this_one() -> None:
    assert (report := audited(0.5, b"b" * 16, "1000-2")).undecided == 1
    assert report.differences == []
