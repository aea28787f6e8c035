"""Writes accepted decisions to Parquet files as they arrive, with their traces if ``results.with_trace`` is on.

Run it with ``python decisions_to_parquet.py FOLDER``; ``KP_BROKER_URL`` says where the queues are. Each decision is in a
journal on disk before it is acknowledged, so it survives a crash. A full journal becomes a file that is named after its
content. So if a crash repeats this step, it writes the same file again; only the last decision may also be in the next file.
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
    """Write the journal's decisions to a Parquet file, and empty the journal."""
    content = journal.read_bytes() if journal.exists() else b""
    # If a crash has cut off a line, its decision was not acknowledged and will be delivered again.
    lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    # A decision that was written but not acknowledged before a crash is delivered again, so keep one for each id.
    decisions = {decision.trace_id: decision for decision in map(Decision.model_validate_json, lines)}
    if decisions:
        table = pl.DataFrame(rows(decisions.values()), infer_schema_length=None)
        traces = [decision.model_dump_json(include={"trace"}) for decision in decisions.values()]
        name = f"decisions-{hashlib.sha256(content).hexdigest()[:16]}.parquet"
        table.with_columns(pl.Series("trace", traces)).write_parquet(journal.with_name(f"{name}.part"))
        journal.with_name(f"{name}.part").replace(journal.with_name(name))
    journal.write_bytes(b"")


def main() -> None:
    """Read decisions until SIGTERM or Ctrl-C."""
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
