"""``kp-scorer reference`` and ``schema``: print files of configuration and the schemas of messages."""

import json
from importlib import resources

import click

from kp_scorer.cli.output import print_text

_FILES = ("kp-scorer.toml", "redis.conf", "users.acl")


@click.command(epilog="Example: kp-scorer reference kp-scorer.toml > kp-scorer.toml")
@click.argument("file", type=click.Choice(_FILES))
def reference(file: str) -> None:
    """Print a configuration file to start from: every setting with its default, Redis' configuration, or its users."""
    print_text(resources.files("kp_scorer.reference").joinpath(file).read_text("utf-8"))


@click.command(epilog="Example: kp-scorer schema decision > decision.schema.json")
@click.argument("message", type=click.Choice(["trace", "decision"]))
def schema(message: str) -> None:
    """Print the JSON Schema of a trace, as it is submitted, or of a decision, as it is published."""
    # Imported here, because they import pydantic, which `reference` does not need.
    from kp_scorer.decision import Decision
    from kp_scorer.trace import ReasoningTrace

    json_schema = ReasoningTrace.model_json_schema() if message == "trace" else Decision.model_json_schema(mode="serialization")
    print_text(json.dumps(json_schema, indent=2, ensure_ascii=False) + "\n")
