"""The entry point of ``kp-scorer``: its commands, and the only place where errors become exit codes.

Every command pays for what this module imports, and probes and shell completion start one every few seconds. So the module of a
command is imported only when that command is called.
"""

import os
import signal
import sys
from importlib import import_module
from typing import Final

import click

from kp_scorer.cli.output import guard_streams, print_note
from kp_scorer.errors import OutputFailed, ScorerError, SettingsError

_COMMANDS: Final = {
    "Try": {
        "demo": ("up", "Try it: an embedded Redis, a worker, some traces."),
        "convert": ("convert", "Convert logs of other tools to traces."),
        "score": ("score", "Score traces offline, in order."),
    },
    "Submit and read": {
        "submit": ("submit", "Submit traces to the queue."),
        "status": ("submit", "Print the state of traces."),
        "decisions": ("submit", "Consume decisions from the results queues."),
        "forward": ("forward", "Hand decisions on to other programs."),
        "keep": ("keep", "Write the traces that are worth keeping."),
        "similar": ("similar", "Print the kept runs most like a task."),
        "mcp": ("similar", "Offer the kept runs to agents (MCP)."),
        "outcome": ("submit", "Submit how a trace turned out later."),
        "label": ("submit", "Label traces as good or bad."),
    },
    "Thresholds": {
        "profiles": ("thresholds", "Print the weights and thresholds in force."),
        "calibrate": ("calibrate", "Suggest thresholds by domain."),
        "quality": ("thresholds", "Estimate the precision and recall of the gate."),
        "re-decide": ("thresholds", "Show which decisions another policy would change."),
    },
    "Inspect": {
        "explain": ("report", "Explain how a decision came about."),
        "report": ("report", "Summarise decisions, as a page or as text."),
        "stats": ("stats", "Print counts of submissions, decisions, queues and workers."),
        "dead-letter": ("dead_letter", "List, show, replay or drop dead letters."),
        "audit": ("audit", "Check the novelty of every decision against the log."),
    },
    "Operate": {
        "up": ("up", "Run an embedded Redis and workers."),
        "down": ("up", "Stop what `up` started, and remove its data if asked to."),
        "worker": ("worker", "Run one worker in the foreground."),
        "serve": ("worker", "Take traces and OpenTelemetry spans over HTTP and gRPC."),
        "doctor": ("doctor", "Check the set-up, and suggest how to mend it."),
        "health": ("health", "Report whether the workers of this machine are live or ready."),
        "cache": ("cache", "Show, warm, pin or empty the shared novelty cache."),
        "export": ("forget", "Print all that is stored of an agent or a namespace."),
        "forget": ("forget", "Erase all that is stored of a trace, an agent or a namespace."),
        "reference": ("reference", "Print a configuration file to start from."),
        "schema": ("reference", "Print the JSON Schema of a message."),
    },
}
"""The commands by group: the module of each, in which its function has the same name, and its line in the help."""
_INTERRUPTED: Final = 130
_UNREAD: Final = 141
_TERMINATED: Final = 143
_MODULES: Final = {name: module for group in _COMMANDS.values() for name, (module, _) in group.items()}


class _LazyGroup(click.Group):
    """Lists its commands by name and help, and imports one when it is resolved. What a command returns is its exit code."""

    def invoke(self, ctx: click.Context) -> None:
        ctx.exit(int(super().invoke(ctx) or 0))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, listed, arguments = super().resolve_command(ctx, args)
        if not listed or not listed.name:
            return name, listed, arguments
        module = import_module(f"kp_scorer.cli.commands.{_MODULES[listed.name]}")
        return name, getattr(module, listed.name.replace("-", "_")), arguments

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by group, in columns of equal width."""
        width = max(map(len, _MODULES))
        for title, group in _COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in group.items()])


@click.group(
    cls=_LazyGroup,
    commands=[click.Command(name, help=line) for group in _COMMANDS.values() for name, (_, line) in group.items()],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all well; 1 some traces were invalid, dead, still pending or unknown, or a check found a fault; "
    "2 wrong usage or settings, or stdout cannot be written; 3 Redis or the broker cannot be reached; "
    "4 a worker stalled or its embedder is unhealthy; 5 `audit` could not check everything it was asked to; 130 interrupted; "
    "141 nobody reads stdout any more. "
    "Results go to stdout, as text on a terminal and as JSON Lines elsewhere; notes go to stderr.",
)
@click.version_option(package_name="kp-scorer")
def commands() -> None:
    """Score AI-agent reasoning traces and route the decisions.

    Example: kp-scorer demo
    """


def main() -> None:
    """Run the command line and exit; an error is one line."""
    if os.getpid() == 1:
        # The kernel spares the first process of a container any signal without a handler. A worker that is stopped while it
        # starts would become ready and take messages until it is killed. Commands with a handler of their own replace this one.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(_TERMINATED))
    guard_streams()
    run()


def run() -> None:
    """Run a command with the streams as they are, and exit."""
    try:
        sys.exit(commands(prog_name="kp-scorer", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        # After wrong usage, name the command that prints the help. The message on a wrong value needs no pointer to it.
        if isinstance(error, click.UsageError) and error.ctx and type(error) is not click.BadParameter:
            message = f"{message.removesuffix('.')}; see `{error.ctx.command_path} --help`"
        print_note(f"kp-scorer: {message}")
        sys.exit(error.exit_code)
    except click.Abort as error:
        is_interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        print_note("Interrupted" if is_interrupted else "Aborted!")
        sys.exit(_INTERRUPTED if is_interrupted else 1)
    except ScorerError as error:
        if isinstance(error, OutputFailed) and error.is_unread:
            # Exit as other commands do when the reader of their output has enough.
            sys.exit(_UNREAD)
        print_note(f"kp-scorer: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        # This is an error such as a full disk, or a user without a home.
        where = f"{error.filename}: " if error.filename else ""
        print_note(f"kp-scorer: {where}{error.strerror or error}")
        sys.exit(SettingsError.exit_code)
