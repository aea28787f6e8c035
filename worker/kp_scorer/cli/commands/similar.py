"""``kp-scorer similar`` and ``mcp``: the kept runs that are most like a task, for people, programs and agents."""

from typing import Annotated

import click
from pydantic import Field

from kp_scorer.cli.options import ledger_options, settings_options
from kp_scorer.cli.output import print_note, print_row, print_text
from kp_scorer.errors import SettingsError
from kp_scorer.kept import MOST_RUNS, KeptRuns, as_prompt
from kp_scorer.settings import Settings

_tokens_option = click.option(
    "--tokens", type=click.IntRange(min=1), default=2_000, show_default=True, help="The most tokens of a prompt."
)


@click.command(epilog='Example: kp-scorer similar "Refund the order of the blue bicycle" kept.jsonl --format prompt')
@click.argument("task")
@click.argument("file", metavar="[FILE|FOLDER]", required=False, type=click.Path(exists=True))
@click.option("-k", "most", type=click.IntRange(1, MOST_RUNS), default=5, show_default=True, help="How many runs.")
@click.option("--format", "form", type=click.Choice(["json", "prompt"]), default="json", help="What to print.")
@_tokens_option
@ledger_options
def similar(task: str, file: str | None, most: int, form: str, tokens: int, settings: Settings) -> None:
    """Print the kept runs that are most like TASK, the nearest first, with what was done.

    FILE is one that `keep` has written, FOLDER one that `keep --into` fills. Without either, the runs that the fleet has
    accepted are printed, as far as the novelty log holds them, by their ids, as Redis has no texts.

    Vectors are those of embedding.embedder; `--set embedding.embedder=words` needs no model. An index beside each file is built
    on first use. With --format prompt the runs are a block for an agent's context, within --tokens.
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
