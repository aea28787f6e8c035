"""Files that a command is given, whoever made them: it holds no more of one than what it is asked for."""

import json
import tracemalloc
from pathlib import Path
from typing import Final

from click.testing import CliRunner
from kp_scorer.cli.main import commands

from tests.support.builders import decision_on, minimal_payload, step

MB: Final = 1_000_000
TRACES: Final = 500


def test_explain_holds_only_the_traces_that_it_quotes(tmp_path: Path) -> None:
    decision, traces = tmp_path / "decision.json", tmp_path / "traces.jsonl"
    decision.write_bytes(decision_on("kp:trace:7"))
    steps = [step("thought", content="x" * 90_000)]
    with traces.open("w") as file:
        for number in range(TRACES):
            file.write(json.dumps(minimal_payload(trace_id=f"kp:trace:{number}", steps=steps)) + "\n")
    tracemalloc.start()
    shown = CliRunner().invoke(commands, ["explain", str(decision), "--traces", str(traces)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "x" * 20 in shown.output
    assert peak_bytes < 20 * MB
