"""``kp-scorer schema``: print a message's JSON Schema."""

import json

import click

from kp_scorer.cli.output import print_text
from kp_scorer.decision import Decision
from kp_scorer.trace import ReasoningTrace


@click.command(epilog="Example: kp-scorer schema decision > decision.schema.json")
@click.argument("message", type=click.Choice(["trace", "decision"]))
def schema(message: str) -> None:
    """Print the JSON Schema of what is submitted (trace) or published (decision)."""
    if message == "trace":
        printed = ReasoningTrace.model_json_schema(mode="validation")
    else:
        printed = Decision.model_json_schema(mode="serialization")
    print_text(json.dumps(printed, indent=2, ensure_ascii=False) + "\n")
