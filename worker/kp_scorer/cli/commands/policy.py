"""``kp-scorer profiles`` and ``re-decide``: the policy in force, and what another one would have decided."""

from collections import Counter
from pathlib import Path

import click

from kp_scorer.analysis.explanation import bound_of
from kp_scorer.cli.gathering import Gathered, gathering_options
from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import print_note, print_row
from kp_scorer.decision import Decision
from kp_scorer.scoring import decide_again
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import load_scoring


@click.command(epilog="Example: kp-scorer profiles --config kp-scorer.toml")
@settings_options
def profiles(settings: Settings) -> None:
    """Print the weights of each profile, and the threshold and review of the domain by its name.

    The default profile is that of all domains without one of their own; their thresholds may differ.
    """
    policy = settings.scoring
    for name, weights in policy.profiles.items():
        bounds = policy.bounds(name)
        row = {"profile": name, **weights.model_dump(), "threshold": bounds.threshold, "review": bounds.review}
        in_words = ", ".join(f"{dimension.replace('_', ' ')} {weight:.2f}" for dimension, weight in weights)
        review = "" if bounds.review is None else f", review {bounds.review:g}"
        print_row(row, f"{name}: {in_words}; threshold {bounds.threshold:g}{review}")


@click.command("re-decide", epilog="Example: kp-scorer re-decide decisions.jsonl --thresholds thresholds.toml > flips.jsonl")
@click.option(
    "--thresholds",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="TOML file whose section scoring applies, such as calibrate writes.",
)
@gathering_options
def re_decide(thresholds: Path, gathered: Gathered, settings: Settings) -> None:
    """Apply other thresholds, weights or profiles to decisions, and print those whose outcome flips.

    The decisions themselves stay as they are, in FILE and in the ledger: a decision never changes. Nothing is embedded.

    The file is tried as it is, over variables and flags, which win over it for a worker. What the
    section scoring does not name is as the settings in force have it, so give this command the --config of your
    workers. What depends on the traces themselves stays as it was decided: scoring.cap_step_term and
    scoring.max_confidence change nothing here, and a threshold that a submission asked for counts only if it was obeyed.
    """
    policy, counts = load_scoring(thresholds, settings), Counter[str]()
    for before, after in ((each.decision, decide_again(each.decision, policy)) for each in gathered.traces):
        if before.outcome != after.outcome:
            print_row(_row(before, after))
        counts["decisions"] += 1
        counts["flips"] += before.outcome != after.outcome
        counts["before"] += before.outcome == "accepted"
        counts["after"] += after.outcome == "accepted"
        counts["weighed"] += before.weights != after.weights
        counts["capped"] += bound_of(before, "max_confidence") != policy.max_confidence
    total = counts["decisions"]
    print_note(f"{counts['flips']} of {total} decisions flip")
    print_note(f"accepted before and after: {counts['before'] / total:.1%}, {counts['after'] / total:.1%}")
    if weighed := counts["weighed"]:
        print_note(f"{weighed} have other weights than they were decided with, and so another score")
    if capped := counts["capped"]:
        print_note(f"{capped} were decided by another scoring.max_confidence, which only scoring their traces anew applies")


def _row(before: Decision, after: Decision) -> dict[str, str | float]:
    both = {
        f"{field}_{name}": getattr(decision, field)
        for field in ("outcome", "score", "threshold")
        for name, decision in (("before", before), ("after", after))
    }
    return {"trace_id": before.trace_id, "domain": before.domain, **both}
