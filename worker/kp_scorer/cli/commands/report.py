"""``kp-scorer report``: what decisions say, as a page or as text."""

from functools import partial
from typing import Final

import click

from kp_scorer.analysis.summary import analyse
from kp_scorer.characters import escaped_lines
from kp_scorer.cli.gathering import Gathered, gathering_options, traces_named
from kp_scorer.cli.output import open_output, print_text
from kp_scorer.report.page import check_installed, page
from kp_scorer.report.text import text
from kp_scorer.report.words import shortened
from kp_scorer.settings import Settings

_SAMPLE: Final = 20_000  # So many decisions take 100 MB.


def _draws_nothing(_context: click.Context, _parameter: click.Parameter, as_text: bool) -> bool:
    if not as_text:
        # Before traces are scored, which may take minutes.
        check_installed()
    return as_text


@click.command(epilog="Example: kp-scorer report decisions.jsonl --output report.html")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, allow_dash=True),
    default="report.html",
    show_default=True,
    help="Where the page goes; - is stdout.",
)
@click.option("--text", "as_text", is_flag=True, callback=_draws_nothing, help="Print it, in place of a page.")
@click.option("--traces", metavar="FILE", type=click.Path(), help="Traces, to show what those of examples were to do.")
@partial(gathering_options, sample=_SAMPLE)
def report(output: str, as_text: bool, traces: str | None, gathered: Gathered, settings: Settings) -> None:
    """Report what decisions say: scores by domain, examples, reasons, what other thresholds would accept, repeats.

    FILE holds traces, which are scored, or decisions as `score` and `decisions` print them. The page is one HTML file that
    needs no network and, without --traces, holds no trace's content; it needs kp-scorer[report], --text does not.
    """
    rows = list(gathered.traces)
    labels = {each.decision.trace_id: each.label for each in rows if each.label is not None}
    analysis = analyse([each.decision for each in rows], gathered.dead_letters, labels)
    shown = [decision for decisions in (*analysis.examples.values(), *analysis.closest) for decision in decisions]
    named = traces_named(traces, shown, settings.limits)
    objectives = {trace_id: shortened(trace.task.objective) for trace_id, trace in named.items()}
    if as_text:
        print_text(escaped_lines(text(analysis, gathered.source, gathered.refused, objectives)) + "\n")
    else:
        html = page(analysis, gathered.source, gathered.refused, objectives)
        with open_output(output) as write:
            write(html)
