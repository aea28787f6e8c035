"""``kp-scorer similar`` and ``mcp``: the kept runs that are most like a task, for people, programs and agents."""

from typing import Annotated

import click
from pydantic import Field

from kp_scorer.cli.options import choice_option, ledger_options, settings_options
from kp_scorer.cli.output import print_note, print_row, print_text
from kp_scorer.errors import SettingsError
from kp_scorer.kept import MOST_RUNS, KeptRuns, as_prompt
from kp_scorer.settings import Settings

_tokens_option = click.option(
    "--tokens", type=click.IntRange(min=1), default=2_000, show_default=True, help="Most tokens in a prompt."
)


@click.command(epilog='Example: kp-scorer similar "Refund the order of the blue bicycle" kept.jsonl --format prompt')
@click.argument("task")
@click.argument("file", metavar="[FILE|FOLDER]", required=False, type=click.Path(exists=True))
@click.option("-k", "most", type=click.IntRange(1, MOST_RUNS), default=5, show_default=True, help="Number of runs.")
@choice_option(
    "--format", "form", choices=("json", "prompt"), default="json", help="Print each run, or a prompt that holds them."
)
@_tokens_option
@ledger_options
def similar(task: str, file: str | None, most: int, form: str, tokens: int, settings: Settings) -> None:
    """Print the kept runs that are most like TASK, the nearest first, with what was done.

    FILE is one that `keep` has written, FOLDER one that `keep --into` fills. Without either, the command searches the runs that
    the fleet has accepted and that are still in the novelty log, and prints them without texts, which Redis does not have.

    The embedder of embedding.embedder compares the runs; `--set embedding.embedder=words` needs no model. On first use, the
    command writes an index beside each file. With --format prompt it prints one text for an agent's context, of at most
    --tokens.
    """
    if form == "prompt" and file is None:
        raise click.UsageError("--format prompt is for FILE, as Redis has no texts")
    runs = KeptRuns(file, settings).similar(task, most)
    if not runs:
        print_note("no runs are kept that succeeded")
    if form == "prompt":
        print_text(as_prompt(runs, tokens))
        return
    for run in runs:
        print_row(run._asdict(), f"{run.similarity:.2f} {run.trace_id} {run.task.strip().partition(chr(10))[0][:200]}")


@click.command(epilog="Example: kp-scorer mcp kept.jsonl")
@click.argument("file", metavar="FILE|FOLDER", type=click.Path(exists=True))
@_tokens_option
@settings_options
def mcp(file: str, tokens: int, settings: Settings) -> None:
    """Offer the kept runs in FILE to an agent over the Model Context Protocol, on stdin and stdout.

    The server has one tool, `similar_runs`, whose answer has at most --tokens.
    """
    try:
        from mcp.server import MCPServer
    except ModuleNotFoundError as error:
        raise SettingsError(f"mcp: there is no {error.name}: install kp-scorer[mcp]") from None
    runs = KeptRuns(file, settings)

    async def similar_runs(task: str, most: Annotated[int, Field(ge=1, le=MOST_RUNS)] = 3) -> str:
        """Return earlier runs that succeeded at tasks like this one: what was asked, called and answered."""
        return as_prompt(runs.similar(task, most), tokens)

    server = MCPServer("kp-scorer")
    server.tool()(similar_runs)
    server.run()
