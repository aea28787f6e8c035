"""``kp-scorer profiles``, ``quality`` and ``re-decide``: show thresholds, estimate their quality, and try others."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import click

from kp_scorer.cli.display import cell, print_table
from kp_scorer.cli.gathering import Gathered, gathering_options
from kp_scorer.cli.options import labels_option, settings_options
from kp_scorer.cli.output import note_count, print_note, print_row
from kp_scorer.errors import ScorerError
from kp_scorer.report.intervals import counted_share
from kp_scorer.report.quality import LEAST_LABELS, Quality, qualities
from kp_scorer.scoring import decide_again
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import load_scoring

_SHARES: Final = ("accepted", "precision", "recall")
_SAMPLE: Final = 10_000  # The default of re-decide's --sample, which gives intervals of a percent.
_MOST_DOMAINS: Final = 10


@click.command(epilog="Example: kp-scorer profiles --config kp-scorer.toml")
@settings_options
def profiles(settings: Settings) -> None:
    """Print the weights of each profile, with the thresholds for acceptance and review of the domain of the same name.

    The default profile applies to all domains without a profile of their own; their thresholds may differ.
    """
    policy = settings.scoring
    for name, weights in policy.profiles.items():
        bounds = policy.bounds(name)
        row = {"profile": name, **weights.model_dump(), "threshold": bounds.threshold, "review": bounds.review}
        in_words = ", ".join(f"{dimension.replace('_', ' ')} {weight:.2f}" for dimension, weight in weights)
        review = "" if bounds.review is None else f", review {bounds.review:g}"
        print_row(row, f"{name}: {in_words}; threshold {bounds.threshold:g}{review}")


@click.command(epilog="Example: kp-scorer quality --stored")
@labels_option
@partial(gathering_options, only_labelled=True)
def quality(gathered: Gathered, settings: Settings) -> None:
    """Estimate precision and recall of the gate, and of other thresholds, from the sampled decisions with labels.

    Workers take the sample, the share review.sample of all traces. Labels come from --labels, a file of JSON Lines such as
    {"trace_id": "kp:trace:…", "good": true}, or with --stored from `kp-scorer label` and late outcomes.

    Precision is the share of good traces among the accepted ones, recall the share of accepted ones among all good traces. Each
    trace is weighted by 1 / the probability of sampling it. If FILE has no sampled decisions, all that have a label in --labels
    count equally. An interval holds in 19 of 20 cases if all sampled traces are labelled, or a random part of them.

    Prints a JSON line, or on a terminal a row, for the gate and for each threshold: first for all domains together, then for
    each domain with 50 labels or more, and last for the smaller domains together. Where domains are together, domain is null.
    """
    labelled = [(each.decision, each.label) for each in gathered.traces]
    is_sample = any(decision.sampled for decision, _ in labelled)
    # People label what they come to see, so labels in a ledger without a sample say little of the gate.
    are_all = not (is_sample or gathered.is_stored or gathered.labels is None)
    estimates = qualities(labelled, settings.scoring.aliases, are_all=are_all)
    if not estimates:
        raise ScorerError(f"none of {len(labelled)} decisions with a label is sampled (review.sample)")
    judged = estimates[0].labels
    print_note(
        f"none of {judged} decisions with a label is sampled (review.sample): the figures are of these alone"
        if are_all
        else f"{judged} of {len(labelled)} decisions with a label are sampled (review.sample)"
    )
    if judged < LEAST_LABELS:
        print_note(f"intervals are checked from {LEAST_LABELS} labels on")
    print_table(("domain", "labels", "threshold", *_SHARES), chain.from_iterable(map(_estimates, estimates)))


def _estimates(quality: Quality) -> Iterator[tuple[dict[str, Any], Sequence[str]]]:
    """Yield each estimate for a domain as a row for programs and as the cells of a table."""
    domain = quality.domains[0] if len(quality.domains) == 1 else None
    first_cells = [f"({len(quality.domains)} together)" if domain is None else cell(domain), f"{quality.labels:,}"]
    for estimate in quality.estimates:
        shares = {name: getattr(estimate, name) for name in _SHARES}
        row: dict[str, Any] = {"domain": domain, "domains": len(quality.domains), "labels": quality.labels}
        row |= {"threshold": estimate.threshold, **{name: share and share._asdict() for name, share in shares.items()}}
        threshold = "as decided" if estimate.threshold is None else f"{estimate.threshold:.2f}"
        cells = (f"{share.value:.0%} ({share.interval})" if share else "none" for share in shares.values())
        yield row, (*first_cells, threshold, *cells)
        first_cells = ["", ""]


@click.command("re-decide", epilog="Example: kp-scorer re-decide decisions.jsonl --thresholds thresholds.toml > flips.jsonl")
@click.option(
    "--thresholds",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="TOML file whose section scoring to apply, such as `calibrate` writes.",
)
@partial(gathering_options, sample=_SAMPLE)
def re_decide(thresholds: Path, gathered: Gathered, settings: Settings) -> None:
    """Apply other thresholds, weights or profiles to decisions, and print those whose outcome changes.

    The decisions stay as they are, in FILE and in the ledger. Nothing is embedded. Notes count the changes, in all and in the
    domains with the most of them, with intervals that hold in 19 of 20 samples.

    Here, the file of --thresholds overrides variables and flags, although for a worker they would override it. Settings that
    its section scoring does not name are those in force, so pass the --config of your workers. Results that depend on the
    traces themselves stay as they were decided: scoring.cap_step_term and scoring.max_confidence change nothing here, and a
    threshold that a submission requested counts only if it was applied.
    """
    policy = load_scoring(thresholds, settings)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for before, after in ((each.decision, decide_again(each.decision, policy)) for each in gathered.traces):
        if before.outcome != after.outcome:
            sides, fields = {"before": before, "after": after}, ("outcome", "score", "threshold")
            both = {f"{field}_{name}": getattr(decision, field) for field in fields for name, decision in sides.items()}
            print_row({"trace_id": before.trace_id, "domain": before.domain, **both})
        counts[before.domain].update(
            decisions=1,
            flips=before.outcome != after.outcome,
            before=before.outcome == "accepted",
            after=after.outcome == "accepted",
            weighed=before.weights != after.weights,
            capped=before.bound("max_confidence") != policy.max_confidence,
        )
    _note_flips(counts)


def _note_flips(counts: Mapping[str, Counter[str]]) -> None:
    """Print how many decisions flip, in all and in the domains where most do, with intervals in case they are a sample."""
    total = sum(counts.values(), Counter())
    print_note(_flips(total))
    flipping = sorted((name for name, each in counts.items() if each["flips"]), key=lambda name: -counts[name]["flips"])
    for name in flipping[:_MOST_DOMAINS]:
        print_note(f"{cell(name)}: {_flips(counts[name])}")
    if len(flipping) > _MOST_DOMAINS:
        print_note(f"and {len(flipping) - _MOST_DOMAINS} more domains")
    note_count(total["weighed"], "have other weights than they were decided with, and so another score")
    note_count(total["capped"], "were decided by another scoring.max_confidence, which only scoring their traces anew applies")


def _flips(counts: Counter[str]) -> str:
    total = counts["decisions"]
    words = f"accepted before and after: {counts['before'] / total:.1%}, {counts['after'] / total:.1%}"
    flips = counted_share(counts["flips"], total)
    return f"{counts['flips']} of {total} decisions flip ({flips.interval if flips else 'none'}); {words}"
