"""Writes kept runs for trainers, as ``kp-scorer keep --as`` does: rows without secrets, with a manifest and a card."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import click
import numpy as np

from kp_scorer.adapters.chat import chat_of, chat_of_trace
from kp_scorer.characters import without_halves
from kp_scorer.cli.candidates import Candidates
from kp_scorer.cli.converting import Batches, Line
from kp_scorer.cli.gathering import task_of
from kp_scorer.cli.output import complete_file, json_line, note_ids, open_output
from kp_scorer.cli.unpacking import open_input, texts_in, unpacked
from kp_scorer.decision import Decision
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.errors import InvalidTrace, SettingsError
from kp_scorer.trace import ReasoningTrace

Shape = Literal["traces", "source", "messages", "pairs"]
SecretsAction = Literal["drop", "replace", "keep"]
Row = dict[str, Any]

NEAR_TASK: Final = 0.8  # The similarity by words from which two objectives are one task.
_ROWS_AT_ONCE: Final = 1_000
_LONGEST_LINE: Final = 2**20
_TASK_FIELDS: Final = ("objective", "task", "question", "prompt", "instruction", "problem_statement", "input", "text")


def row_of(line: Line, shape: Shape, trace: ReasoningTrace, decision: Decision | None) -> Row:
    """Return the row of a run in a shape; the number of runs that it stands for is still missing."""
    place = {"file": line.file, "line": line.number}
    score = decision.score if decision else None
    if shape == "source":
        records = [record.value for record in line.run.records] if line.run else [dict(line.document)]
        source = records[0] if len(records) == 1 else records
        made = decision.model_dump(mode="json", exclude={"trace"}) if decision else None
        return {"trace_id": trace.id, **place, "score": score, "decision": made, "source": source}
    chat = chat_of(line.run) if line.run else chat_of_trace(trace)
    about = {"task": task_of(trace, line.document), "domain": trace.metadata.task_domain, "success": trace.metadata.success}
    # Write tools as text: a table has one type for the objects of a column, so each tool would get the fields of all others.
    tools = json.dumps(chat.tools, ensure_ascii=False) if chat.tools else None
    return {"messages": chat.messages, "tools": tools, "trace_id": trace.id, **about, "score": score, **place}


def rows_of_set(shape: Shape, candidates: Candidates, places: Sequence[int], stands_for: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of the runs at these places. ``stands_for`` has by id how many other runs each of them stands for."""
    failures = _failures(candidates) if shape == "pairs" else {}
    for place in places:
        run = candidates.runs[place]
        if shape == "traces":
            yield candidates.document(place)
        elif shape != "pairs":
            yield candidates.document(place) | {"stands_for": stands_for[run.trace_id]}
        elif run.success:
            about = candidates.document(place)
            pair = {"chosen": about.pop("messages")}
            # The same chat may have succeeded once and failed once. As a pair, these two would teach nothing.
            others = (each for each in failures.get((run.domain, run.task), ()) if each["messages"] != pair["chosen"])
            if failure := next(others, None):
                pair |= {"rejected": failure["messages"]} | about
                yield pair | {"stands_for": stands_for[run.trace_id], "rejected_id": failure["trace_id"]}


def _failures(candidates: Candidates) -> Mapping[tuple[str, int], Iterator[Row]]:
    """Return the rows of failed runs by task, in order."""
    places = defaultdict[tuple[str, int], list[int]](list)
    for place, run in enumerate(candidates.runs):
        if not run.success:
            places[run.domain, run.task].append(place)
    return {task: map(candidates.document, each) for task, each in places.items()}


class Against:
    """The tasks in a file, such as a benchmark's. Runs with an equal or near objective are left out."""

    def __init__(self, name: str) -> None:
        """Read a text on each line, or the task in each JSON object; raise BadParameter if a line, or the file, has none."""
        self._embedder = WordsEmbedder()
        with open_input(name) as opened:
            lines = texts_in(unpacked(opened), _LONGEST_LINE, "--against")
            tasks = [(number, _task_in(number, line)) for number, line in lines]
        if not tasks:
            raise click.BadParameter("expected a task on each line, got an empty file", param_hint="--against")
        self._numbers = [number for number, _ in tasks]
        self._vectors = self._embedder.embed([task for _, task in tasks])
        self.left_out: list[Row] = []

    def filtered(self, batches: Batches) -> Iterator[list[Line]]:
        """Yield the input without the runs whose task is in the file; at the end print which were left out."""
        for batch in batches:
            yield [line for line in batch if isinstance(line.trace, InvalidTrace) or not self._has(line.trace)]
        note_ids([row["trace_id"] for row in self.left_out], "left out, as their tasks are in the file of --against")

    def _has(self, trace: ReasoningTrace) -> bool:
        similarities = self._vectors @ self._embedder.embed([trace.task.objective])[0]
        if not similarities.size or similarities.max() < NEAR_TASK:
            return False
        place = int(np.argmax(similarities))
        row = {"trace_id": trace.id, "line": self._numbers[place], "similarity": round(float(similarities[place]), 4)}
        self.left_out.append(row)
        return True


def _task_in(number: int, text: str) -> str:
    if not text.startswith(("{", "[", '"')):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        # A trace has its objective within its task.
        fields = value | value["task"] if isinstance(value.get("task"), dict) else value
        value = next((fields[name] for name in _TASK_FIELDS if isinstance(fields.get(name), str)), None)
    if isinstance(value, str):
        return value
    raise click.BadParameter(
        f"line {number}: expected a text, or an object with {', '.join(_TASK_FIELDS)}", param_hint="--against"
    )


def files_beside(path: Path) -> tuple[Path, Path]:
    """Return the files of the manifest and of the card that are written beside a file of rows."""
    return path.parent / f"{path.stem}.manifest.json", path.parent / f"{path.stem}.md"


class TrainingFile:
    """A file of rows, with its manifest and card."""

    def __init__(self, output: str, secrets: SecretsAction) -> None:
        if not output.endswith((".jsonl", ".parquet")):
            raise click.BadParameter("expected the name of a file that ends in .jsonl or .parquet", param_hint="--output")
        if output.endswith(".parquet") and not find_spec("pyarrow"):
            raise SettingsError("--output: Parquet needs its extra: pip install 'kp-scorer[parquet]'")
        self._path, self._secrets = Path(output), secrets
        self._manifest, self._card = files_beside(self._path)
        self._counts = {name: Counter[str]() for name in ("domain", "task", "success")}
        self._dropped_ids: list[str] = []
        self._redaction: Any = None
        if secrets != "keep":
            # This module needs an extra, and takes a second to load.
            from kp_scorer.checks import redaction

            self._redaction, self._redactor = redaction, redaction.Redactor()

    def write(self, rows: Iterable[Row]) -> None:
        """Write the rows without secrets. A run whose row still holds something secret is dropped."""
        with complete_file(str(self._path)) as partial:
            if self._path.suffix == ".parquet":
                _write_parquet(partial, self._clean(rows))
            else:
                with partial.open("w", encoding="utf-8") as file:
                    file.writelines(json_line(row, allow_nan=False) for row in self._clean(rows))
            note_ids(self._dropped_ids, "dropped, as they hold something secret")

    def _clean(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            redacted = self._redactor.redacted(row) if self._redaction else row
            clean = _in_utf8(redacted)
            # Search once more: what replaces a text may reveal another one beside it.
            if self._redaction and ((self._secrets == "drop" and redacted != row) or not self._redaction.is_clean(clean)):
                self._dropped_ids.append(row["trace_id"])
                continue
            for name, count in self._counts.items():
                count[str(clean[name])] += 1
            yield clean

    def describe(self, how: Mapping[str, Any], sources: Iterable[str], against: Against | None, licence: str | None) -> None:
        """Write the manifest, as JSON, and the card, as Markdown. Equal inputs give equal files."""
        manifest = {
            "file": self._path.name,
            "sha256": _digest(self._path),
            "rows": self._counts["success"].total(),
            "succeeded": self._counts["success"]["True"],
            "failed": self._counts["success"]["False"],
            "domains": dict(sorted(self._counts["domain"].items())),
            "tasks": len(self._counts["task"]),
            "licence": licence,
            "made_by": f"kp-scorer {version('kp-scorer')}",
            "how": dict(how),
            "secrets": self._secrets,
            "dropped": len(self._dropped_ids),
            "replaced": dict(sorted(self._redactor.counts.items())) if self._secrets == "replace" else {},
            "left_out": against.left_out if against else [],
            "sources": [{"file": name, "sha256": _digest(Path(name))} for name in sources],
        }
        manifest = _in_utf8(self._redactor.redacted(manifest) if self._redaction else manifest)
        with open_output(str(self._manifest)) as write:
            write(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        with open_output(str(self._card)) as write:
            write(_card(manifest))


def _in_utf8(value: Any) -> Any:
    """Return JSON without half characters, which cut texts and names of files may have, and readers would refuse."""
    return json.loads(without_halves(json.dumps(value, ensure_ascii=False)))


def _write_parquet(path: Path, rows: Iterator[Row]) -> None:
    """Write rows as Parquet, with the columns of their shape: inferred types would differ from file to file."""
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.string()
    function = pyarrow.struct({"name": text, "arguments": text})
    calls = pyarrow.list_(pyarrow.struct({"id": text, "type": text, "function": function}))
    message = {"role": text, "content": text, "tool_calls": calls, "tool_call_id": text, "name": text}
    types = dict.fromkeys(("messages", "chosen", "rejected"), pyarrow.list_(pyarrow.struct(message)))
    types |= {"success": pyarrow.bool_(), "score": pyarrow.float64(), "stands_for": pyarrow.int64(), "line": pyarrow.int64()}
    first = list(islice(rows, _ROWS_AT_ONCE))
    schema = pyarrow.schema([(name, types.get(name, text)) for name in (first[0] if first else ())])
    with path.open("wb") as file, parquet.ParquetWriter(file, schema) as writer:
        while first:
            writer.write_table(pyarrow.Table.from_pylist(first, schema))
            first = list(islice(rows, _ROWS_AT_ONCE))


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None for what is not a file, such as standard input."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _card(manifest: Mapping[str, Any]) -> str:
    def listed(values: Mapping[str, Any]) -> str:
        return "\n".join(f"- {name}: {value}" for name, value in values.items()) or "- nothing"

    sources = {source["file"]: source["sha256"] or "no file" for source in manifest["sources"]}
    head = f"---\nlicense: {manifest['licence']}\n---\n\n" if manifest["licence"] else ""
    return f"""{head}# {manifest["file"]}

{manifest["rows"]} rows from runs of agents, of {manifest["tasks"]} tasks; {manifest["succeeded"]} runs succeeded. Made by
{manifest["made_by"]}.

## How they were chosen

{listed(manifest["how"])}
- left out, as their task is in the file of --against: {len(manifest["left_out"])}

## Domains

{listed(manifest["domains"])}

## What was replaced

{listed(manifest["replaced"])}
- runs dropped, as they held something secret: {manifest["dropped"]}

## Sources

{listed(sources)}
"""
