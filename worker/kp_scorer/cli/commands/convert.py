"""``kp-scorer convert``: traces from what others record."""

import sys
from collections.abc import Callable
from typing import Any, Final, get_args

import click
from pydantic import TypeAdapter, ValidationError

from kp_scorer import adapters
from kp_scorer.adapters import FORMATS, MOST_DEPTH, SuppliedFields
from kp_scorer.cli.input import open_input, read_json
from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import print_json, print_note
from kp_scorer.errors import NotConverted
from kp_scorer.settings import Settings
from kp_scorer.trace import Domain, Fraction, IsoDatetime, Metadata

_VISIBILITIES: Final = get_args(Metadata.model_fields["visibility"].annotation)
_PRIVACY_LEVELS: Final = get_args(Metadata.model_fields["privacy_level"].annotation)


def _checked(kind: Any) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Check an option for a field of every trace by the type of that field."""
    field: TypeAdapter[Any] = TypeAdapter(kind)

    def check(_context: click.Context, option: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else field.validate_python(value)
        except ValidationError as error:
            raise click.BadParameter(error.errors()[0]["msg"], param=option) from None

    return check


@click.command(
    epilog="Example: kp-scorer convert --from openai chats.jsonl --confidence 0.8 --domain code --success "
    "--visibility private --privacy-level private --created-at 2026-01-31T12:00Z > traces.jsonl"
)
@click.argument("file", metavar="FILE|-")
@click.option("--from", "format_name", type=click.Choice(list(FORMATS)), required=True, help="What FILE has.")
@click.option(
    "--confidence", callback=_checked(Fraction), metavar="FRACTION", required=True, help="How sure the outcomes are, 0 to 1."
)
@click.option("--domain", callback=_checked(Domain), required=True, help="The domain of the tasks.")
@click.option("--visibility", type=click.Choice(_VISIBILITIES), required=True, help="Who may see the traces.")
@click.option("--privacy-level", type=click.Choice(_PRIVACY_LEVELS), required=True, help="How they may be shared.")
@click.option("--success/--failed", default=None, help="How the runs ended whose source does not record it.")
@click.option(
    "--created-at",
    callback=_checked(IsoDatetime),
    metavar="TIME",
    help="When the runs were whose source does not record it (ISO 8601).",
)
@settings_options
def convert(file: str, format_name: str, settings: Settings, domain: str, **fields: Any) -> None:
    """Convert what others record in FILE (- for standard input) to traces that `score` and `submit` read.

    FILE is JSON Lines or one JSON document, and may be gzipped. Prints the traces as JSON Lines. What cannot be converted is
    reported by line and field; the others are converted.
    """
    supplied = SuppliedFields(task_domain=domain, **fields)
    done = converted = 0
    steps = calls = recoveries = without_calls = 0
    with open_input(file) as stream:
        sources = read_json(stream, settings.limits.model_copy(update={"depth": MOST_DEPTH}))
        for result in adapters.convert(format_name, sources, supplied, settings.limits):
            done += 1
            if isinstance(result, NotConverted):
                print_note(str(result))
                problems = [problem._asdict() for problem in result.problems]
                print_json({"line": result.line, "state": "invalid", "problems": problems})
            else:
                converted += 1
                called = sum("tool" in step for step in result["steps"])
                steps, calls, without_calls = steps + len(result["steps"]), calls + called, without_calls + (not called)
                recoveries += sum(step["type"] == "error_recovery" for step in result["steps"])
                print_json(result)
    counts = f"{steps} steps, {calls} tool calls, {recoveries} error recoveries; {without_calls} without tools"
    print_note(f"converted {converted} of {done}: {counts}" if done else f"nothing to convert in {file}")
    if converted < done:
        sys.exit(1)
