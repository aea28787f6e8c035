"""``kp-scorer re-decide``: what other thresholds, weights or profiles would have decided."""

import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Final

import click
from rich.markup import escape
from rich.table import Table

from kp_scorer.analysis.flips import Flips, Redecided, flips_by_domain, redecided
from kp_scorer.characters import escaped
from kp_scorer.cli.figures import percent
from kp_scorer.cli.gathering import Gathered, gathering_options
from kp_scorer.cli.options import overruled
from kp_scorer.cli.output import console, print_json, say
from kp_scorer.settings import Settings, load_scoring

_DOMAIN_COLUMNS: Final = 16


@click.command("re-decide", epilog="Example: kp-scorer re-decide decisions.jsonl --thresholds thresholds.toml > flips.jsonl")
@click.option(
    "--thresholds",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="TOML file whose section scoring applies, such as calibrate writes.",
)
@gathering_options
def redecide(thresholds: Path, gathered: Gathered, settings: Settings) -> None:
    """Apply other thresholds, weights or profiles to decisions, and print those whose outcome flips as JSON Lines.

    The decisions themselves stay as they are, in FILE and in the ledger: a decision never changes. Nothing is embedded.

    The file is tried as it is, over variables and flags, which win over it for a worker; what they would win is said. What the
    section scoring does not name is as the settings in force have it, so give this command the --config of your
    workers. What depends on the traces themselves stays as it was decided: scoring.cap_step_term changes nothing here, and
    a threshold that a submission asked for counts only if it was obeyed.
    """
    tried = load_scoring(thresholds, settings)
    found = redecided(gathered.decisions, tried.scoring.policy())
    for pair in found:
        if pair.is_flip:
            print_json(_flip(pair))
    if found:
        console().print(_table(flips_by_domain(found)))
    _say_what_changes(found, gathered.source)
    for note in overruled(str(thresholds), tried.named):
        say(note)
    if gathered.refused:
        sys.exit(1)


def _flip(pair: Redecided) -> dict[str, str | float]:
    before, after = pair
    return {
        "trace_id": before.trace_id,
        "domain": before.domain,
        "outcome_before": before.outcome,
        "outcome_after": after.outcome,
        "score_before": before.score,
        "score_after": after.score,
        "threshold_before": before.threshold,
        "threshold_after": after.threshold,
    }


def _table(by_domain: Mapping[str, Flips]) -> Table:
    """One row a domain, and one for all, of 80 columns at most."""
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 1))
    table.add_column("domain", no_wrap=True, max_width=_DOMAIN_COLUMNS)
    for heading in ("traces", "accepted", "then", "flips", "to accepted", "review", "rejected"):
        table.add_column(heading, justify="right", no_wrap=True)
    for domain, flips in by_domain.items():
        table.add_row(escape(escaped(domain)), *_cells(flips))
    table.add_row("(all)", *_cells(reduce(Flips.__add__, by_domain.values(), Flips())))
    return table


def _cells(flips: Flips) -> list[str]:
    figures = (flips.total, flips.to_accepted, flips.to_review, flips.to_rejected)
    shares = (flips.accepted_before / flips.traces, flips.accepted_after / flips.traces)
    return [str(flips.traces), *map(percent, shares), *map(str, figures)]


def _say_what_changes(found: Sequence[Redecided], source: str) -> None:
    say(f"{sum(pair.is_flip for pair in found)} of {len(found)} decisions flip" if found else f"no decisions in {source}")
    if weighed := sum(pair.is_weighed_otherwise for pair in found):
        say(f"{weighed} have other weights than they were decided with, and so another score")
