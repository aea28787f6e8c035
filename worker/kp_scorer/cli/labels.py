"""Which traces were good, from a file: JSON Lines or CSV."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import click

_WORDS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_labels(file: Path) -> dict[str, bool]:
    """Read labels by trace id: of ``{"trace_id": …, "good": true}`` lines, or of CSV with columns of these names.

    Raises:
        BadParameter: the file cannot be read or is neither; a line has no such field; a trace is labelled both ways.
    """
    try:
        # Excel begins CSV with a byte order mark.
        text = file.read_text("utf-8-sig")
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}", param_hint="--labels") from None
    except UnicodeDecodeError:
        raise click.BadParameter(f"{file}: expected UTF-8", param_hint="--labels") from None
    found: dict[str, bool] = {}
    for number, trace_id, good in _from_json(text) if text.lstrip().startswith("{") else _from_csv(text):
        if found.setdefault(trace_id, good) != good:
            _refuse(number, "good: this trace has the other label on an earlier line")
    return found


def _from_json(text: str) -> Iterator[tuple[int, str, bool]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            _refuse(number, "expected a JSON object")
        trace_id, good = row.get("trace_id"), row.get("good")
        if not isinstance(trace_id, str):
            _refuse(number, "trace_id: expected a text")
        if not isinstance(good, bool):
            _refuse(number, "good: expected true or false")
        yield number, trace_id, good


def _from_csv(text: str) -> Iterator[tuple[int, str, bool]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        missing = {"trace_id", "good"} - set(reader.fieldnames or ())
        if missing:
            _refuse(1, f"{' and '.join(sorted(missing))}: expected columns of this name, or JSON Lines")
        for row in reader:
            good = _WORDS.get((row["good"] or "").strip().lower())
            if good is None:
                _refuse(reader.line_num, f"good: expected one of {', '.join(_WORDS)}")
            yield reader.line_num, row["trace_id"] or "", good
    except csv.Error as error:
        _refuse(reader.line_num, str(error))


def _refuse(number: int, what: str) -> NoReturn:
    raise click.BadParameter(f"line {number}: {what}", param_hint="--labels")
