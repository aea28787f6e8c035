"""``python -m tests.model.long_run --steps 1000000`` runs for long, and exits with 1 and the sequence that fails, if any."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.model.runs import cut_down, prepared, run
from tests.model.server import running

_PROGRESS_EVERY_S = 10.0


def main() -> int:
    """Run for ``--steps`` steps, with progress on stderr; print a summary as JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=150, help="steps of one run, after which everything is ended")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each run has the next one")
    chosen = parser.parse_args()
    executed = Counter[str]()
    started, printed_at_s = time.monotonic(), 0.0
    seed, failure = chosen.seed, None
    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as server, prepared():
        while executed.total() < chosen.steps and failure is None:
            failure = run(server, seed, chosen.length, executed)
            seed += 1
            elapsed_s = time.monotonic() - started
            if elapsed_s - printed_at_s > _PROGRESS_EVERY_S:
                printed_at_s = elapsed_s
                print(f"{executed.total()} steps, {executed.total() / elapsed_s:.0f}/s", file=sys.stderr)  # noqa: T201
        if failure:
            print(cut_down(server, failure), file=sys.stderr)  # noqa: T201
    summary = {
        "steps": executed.total(),
        "seconds": round(time.monotonic() - started, 1),
        "runs": seed - chosen.seed,
        "violation": failure.violation if failure else None,
        "rules": dict(executed.most_common()),
    }
    print(json.dumps(summary))  # noqa: T201
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
