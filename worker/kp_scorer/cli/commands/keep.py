"""``kp-scorer keep``: write the traces that are accepted, or the set of traces that covers all of them best."""

from pathlib import Path
from typing import Any, get_args

import click

from kp_scorer.cli.converting import Conversion, converting_options
from kp_scorer.cli.keeping import Rank
from kp_scorer.cli.kept_rows import Best, KeptFolder, Request, write_kept
from kp_scorer.cli.options import choice_option, ledger_options, since_option
from kp_scorer.cli.training import SecretsAction, Shape
from kp_scorer.settings import Settings


def _best(text: str) -> Best:
    """Parse a share of all traces, such as 10%, or a number of traces, such as 500."""
    try:
        best = float(text.removesuffix("%")) / 100 if text.endswith("%") else int(text)
    except ValueError:
        best = 0
    if not best > 0 or (isinstance(best, float) and best > 1):
        raise click.BadParameter("expected a share of all traces, such as 10%, or a number of them, such as 500")
    return best


@click.command(epilog="Example: kp-scorer keep traces.jsonl --best 10% --output kept.jsonl")
@click.argument("files", metavar="FILE|FOLDER|-...", nargs=-1, type=click.Path(allow_dash=True))
@click.option(
    "--best",
    type=_best,
    metavar="SHARE|NUMBER",
    help="Keep 10% of all traces, or 500: the successes that cover all traces best.",
)
@choice_option(
    "--rank",
    choices=get_args(Rank),
    default="coverage",
    help="With --best, choose for the best coverage, or the successes with the highest scores.",
)
@click.option("--most-by-task", type=click.IntRange(min=1), help="With --best, keep at most this many traces of each task.")
@click.option(
    "--into",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    callback=lambda _context, _option, path: path and KeptFolder(path),
    help="With --best, write a new file to this folder, with traces that add to those in its earlier files.",
)
@click.option("--why", metavar="FILE", type=click.Path(), help="With --best, write to FILE why each trace is kept or not.")
@click.option(
    "--output", metavar="FILE", type=click.Path(allow_dash=True), default="-", help="File to write; by default stdout."
)
@click.option("--stored", is_flag=True, help="Read the decisions in the ledger instead of scoring FILE.")
@since_option
@choice_option(
    "--as",
    "shape",
    choices=get_args(Shape),
    default="traces",
    help="Write traces, the records as they were read, chats for trainers, or pairs of a kept success and a failure.",
)
@choice_option(
    "--secrets",
    choices=get_args(SecretsAction),
    help="With --as messages or pairs, drop runs with secrets or personal data, replace these (the default), or keep them.",
)
@click.option(
    "--against", metavar="FILE", type=click.Path(), help="Leave out runs whose task is in FILE, such as a benchmark's."
)
@click.option("--licence", help="Licence of the runs, for the card that --as messages and pairs write.")
@click.option(
    "--review",
    "outcome",
    flag_value="review",
    default="accepted",
    help="Without --best, keep what goes to review instead of what is accepted.",
)
@click.option("--rejected", "outcome", flag_value="rejected", help="Without --best, keep what is rejected instead.")
@ledger_options
@converting_options
def keep(files: tuple[str, ...], settings: Settings, conversion: Conversion, **options: Any) -> bool:
    """Write the traces in FILE that are worth keeping, each once, as JSON Lines.

    With --best, these form a set: for each domain, the successful traces that together are most like all of its traces, failed
    ones included. Such a set covers frequent tasks and leaves out copies. Choosing it needs no model. --why says of each
    kept trace how many others it stands for, and of each other trace which kept one stands for it. --into adds a new file to a
    folder, with traces of tasks that those in the folder do not cover.

    --best with --stored chooses among the traces that the fleet has decided, by the vectors in the novelty log, which holds the
    newest 11,000 by default. As Redis has no texts, it writes only a line about each kept trace, with its id, unless FILE has
    the texts.

    Without --best, these are the traces that `score` accepts, offline and in order; their metadata.quality_score becomes their
    score.

    With --as messages or pairs, secrets and personal data (e-mail addresses, telephone and card numbers, names in home paths)
    are replaced, unless --secrets says otherwise, and a manifest and a card are written beside the file. SCORING.md describes
    the rows.

    Invalid lines are left out and named on stderr. With --stored and without --best, traces without a decision are left out
    and counted in a note. In both cases the exit code is 1.
    """
    request = Request(files, bool(settings.checks.names), **options)
    request.check()
    return write_kept(request, conversion, settings)
