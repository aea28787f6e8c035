"""The command group, and the one place where errors become exit codes."""

import sys
from importlib.metadata import version

import click

from worker.cli.dead_letter import dead_letter
from worker.cli.decisions import decisions
from worker.cli.demo import demo
from worker.cli.log import audit, cache, forget
from worker.cli.run import up, worker
from worker.cli.schema import schema
from worker.cli.score import score
from worker.cli.state import stats, status
from worker.cli.submit import submit
from worker.errors import ScorerError


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all well; 1 some traces were invalid, dead or still pending; 2 wrong usage or settings; "
    "3 Redis or the broker cannot be reached; 4 a worker came to a standstill. "
    "Output for programs is JSON Lines on stdout, everything else goes to stderr.",
)
@click.version_option(version("kp-scorer"))
def commands() -> None:
    """Score AI-agent reasoning traces and route the decisions.

    Example: kp-scorer demo
    """


for command in (demo, up, worker, submit, decisions, status, stats, score, dead_letter, audit, forget, cache, schema):
    commands.add_command(command)


def main() -> None:
    """Run the command line and exit."""
    try:
        commands(prog_name="kp-scorer")
    except ScorerError as error:
        click.echo(f"kp-scorer: {error}", err=True)
        sys.exit(error.exit_code)
