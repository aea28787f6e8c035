"""Writes accepted decisions, and with ``results.with_trace`` their traces, to Parquet files as they come.

Run it with ``python decisions_to_parquet.py FOLDER``; ``KP_BROKER_URL`` says where the queues are. A decision is in a journal
on disk before it is acknowledged, and so survives a crash. A full journal becomes a file that is named after its content, so
that a crash in between makes no second one; only the decision that was written last may be in the next file too.
"""

import hashlib
import os
import signal
import sys
import threading
from pathlib import Path

import polars as pl
from kp_scorer import Decision, read_decisions, rows

MOST = int(os.environ.get("DECISIONS_A_FILE", "1000"))


def roll(journal: Path) -> None:
    """Make a Parquet file of what is in the journal, and empty that."""
    content = journal.read_bytes() if journal.exists() else b""
    # A line that a crash cut was not acknowledged.
    lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    # By id: what a crash kept from being acknowledged came again.
    decisions = {decision.trace_id: decision for decision in map(Decision.model_validate_json, lines)}
    if decisions:
        table = pl.DataFrame(rows(decisions.values()), infer_schema_length=None)
        traces = [decision.model_dump_json(include={"trace"}) for decision in decisions.values()]
        name = f"decisions-{hashlib.sha256(content).hexdigest()[:16]}.parquet"
        table.with_columns(pl.Series("trace", traces)).write_parquet(journal.with_name(f"{name}.part"))
        journal.with_name(f"{name}.part").replace(journal.with_name(name))
    journal.write_bytes(b"")


def main() -> None:
    """Read until SIGTERM or Ctrl-C."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    journal = folder / "journal.jsonl"
    roll(journal)
    with journal.open("ab") as file:
        for count, decision in enumerate(read_decisions("accepted", group="parquet", stopping=stopping), 1):
            file.write(decision.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            if count % MOST == 0:
                roll(journal)
    roll(journal)


if __name__ == "__main__":
    main()
