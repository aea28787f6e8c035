"""A user's program, which runs where only the wheel is installed. It is among the tests so that its types are checked."""

import json
import sys
from importlib import resources

from kp_scorer import Client, Decision, ReasoningTrace, ServiceUnavailable, score_traces


def decide(trace: ReasoningTrace) -> Decision:
    with Client.connect() as client:
        return client.wait(client.submit(trace), timeout_s=60)


def main() -> None:
    line = resources.files("kp_scorer.samples").joinpath("traces.jsonl").read_text("utf-8").splitlines()[0]
    trace = ReasoningTrace.model_validate(json.loads(line))
    try:
        decision = decide(trace)
    except ServiceUnavailable as error:
        sys.exit(str(error))
    (offline,) = score_traces([trace])
    assert offline.score == decision.score
    sys.stdout.write(decision.model_dump_json())


if __name__ == "__main__":
    main()
