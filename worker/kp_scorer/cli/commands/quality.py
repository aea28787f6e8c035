"""``kp-scorer quality``: how good the gate is, by the labels of a sample."""

import sys
from collections.abc import Mapping
from typing import Any, Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from kp_scorer.analysis.quality import LEAST_LABELS, qualities
from kp_scorer.cli.commands.calibrate import interval
from kp_scorer.cli.commands.label import labels_option
from kp_scorer.cli.display import cell
from kp_scorer.cli.gathering import Gathered, gathering_options
from kp_scorer.cli.output import print_note, print_row
from kp_scorer.decision import Decision
from kp_scorer.errors import ScorerError
from kp_scorer.settings import Settings

_SHARES: Final = ("accepted", "precision", "recall")


@click.command(epilog="Example: kp-scorer quality --stored")
@labels_option
@gathering_options
def quality(labels: Mapping[str, bool] | None, gathered: Gathered, settings: Settings) -> None:
    """Estimate precision and recall of the gate, and of other thresholds, from the sampled decisions with labels.

    What is sampled the workers' review.sample says. Which traces were good --labels says: JSON Lines
    {"trace_id": "kp:trace:…", "good": true}; without it, with --stored, the labels of `kp-scorer label` do.

    Precision is the share of good traces among the accepted ones, recall the share of accepted ones among all good traces.
    Each trace weighs 1 / the probability by which it was sampled. An interval holds in 19 of 20 cases, if those with a label
    are all of the sample, or chosen by nobody who knew them. Prints a JSON line for the gate and for each threshold, of all
    domains and of each with 50 labels or more, the others being together (domain null); to a terminal a table.
    """
    total, sampled, stored = 0, list[Decision](), dict[str, bool]()
    for decision, label, _ in gathered.traces:
        total += 1
        if decision.sampled:
            sampled.append(decision)
            if label is not None:
                stored[decision.trace_id] = label
    labels = stored if labels is None else labels
    judged = sum(decision.trace_id in labels for decision in sampled)
    if not judged:
        raise ScorerError(f"{len(sampled)} of {total} decisions are sampled (review.sample), none has a label")
    print_note(f"{judged} of {len(sampled)} sampled traces have a label, of {total} decisions")
    if judged < LEAST_LABELS:
        print_note(f"intervals are checked from {LEAST_LABELS} labels on")
    columns = (Column(heading, justify="right", no_wrap=True) for heading in ("labels", "threshold", *_SHARES))
    table = Table("domain", *columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for each in qualities(sampled, labels, settings.scoring.aliases):
        domain = each.domains[0] if len(each.domains) == 1 else None
        cells = [f"({len(each.domains)} together)" if domain is None else cell(domain), f"{each.labels:,}"]
        for estimate in each.estimates:
            row: dict[str, Any] = {"domain": domain, "domains": len(each.domains), "labels": each.labels}
            cells.append("as decided" if estimate.threshold is None else f"{estimate.threshold:.2f}")
            shares = {name: getattr(estimate, name) for name in _SHARES}
            row |= {"threshold": estimate.threshold, **{name: share and share._asdict() for name, share in shares.items()}}
            print_row(row, "")
            table.add_row(*cells, *(f"{share.value:.0%} ({interval(share)})" if share else "none" for share in shares.values()))
            cells = ["", ""]
    if sys.stdout.isatty():
        Console().print(table)
