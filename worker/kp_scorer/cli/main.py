"""The command group, and the one place where errors become exit codes."""

import sys
from importlib.metadata import version

import click

from kp_scorer.cli.audit import audit
from kp_scorer.cli.cache import cache
from kp_scorer.cli.calibrate import calibrate
from kp_scorer.cli.capacity import capacity
from kp_scorer.cli.completion import completion
from kp_scorer.cli.convert import convert
from kp_scorer.cli.dead_letter import dead_letter
from kp_scorer.cli.decisions import decisions
from kp_scorer.cli.demo import demo
from kp_scorer.cli.doctor import doctor
from kp_scorer.cli.explain import explain
from kp_scorer.cli.forget import forget
from kp_scorer.cli.health import health
from kp_scorer.cli.output import say
from kp_scorer.cli.redecide import redecide
from kp_scorer.cli.reference import reference
from kp_scorer.cli.report import report
from kp_scorer.cli.schema import schema
from kp_scorer.cli.score import score
from kp_scorer.cli.stats import stats
from kp_scorer.cli.status import status
from kp_scorer.cli.submit import submit
from kp_scorer.cli.top import top
from kp_scorer.cli.up import up
from kp_scorer.cli.worker import worker
from kp_scorer.errors import ScorerError


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all well; 1 some traces were invalid, dead, still pending or unknown; 2 wrong usage or settings, "
    "or stdout cannot be written; 3 Redis or the broker cannot be reached; 4 a worker came to a standstill. "
    "Output for programs is JSON Lines on stdout, everything else goes to stderr.",
)
@click.version_option(version("kp-scorer"))
def commands() -> None:
    """Score AI-agent reasoning traces and route the decisions.

    Example: kp-scorer demo
    """


_COMMANDS = (
    demo,
    up,
    worker,
    submit,
    decisions,
    status,
    explain,
    stats,
    top,
    doctor,
    health,
    score,
    calibrate,
    redecide,
    convert,
    report,
    dead_letter,
    audit,
    forget,
    cache,
    capacity,
    schema,
    reference,
    completion,
)
for command in _COMMANDS:
    commands.add_command(command)


def run() -> None:
    """Run the command line and exit; what is wrong is said in one line."""
    try:
        sys.exit(commands(prog_name="kp-scorer", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        say(f"kp-scorer: {_in_one_line(error)}")
        sys.exit(error.exit_code)
    except click.Abort:
        say("Aborted!")
        sys.exit(1)
    except ScorerError as error:
        say(f"kp-scorer: {error}")
        sys.exit(error.exit_code)


def _in_one_line(error: click.ClickException) -> str:
    """What click says of wrong usage, and where to read how it is right."""
    said = " ".join(error.format_message().split())
    # What is wrong with a value is said in full.
    if isinstance(error, click.UsageError) and error.ctx and type(error) is not click.BadParameter:
        return f"{said.removesuffix('.')}; see `{error.ctx.command_path} --help`"
    return said
