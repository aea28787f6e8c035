"""``kp-scorer profiles``: the weights and thresholds in force."""

import click

from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import print_row
from kp_scorer.settings import Settings


@click.command(epilog="Example: kp-scorer profiles --config kp-scorer.toml")
@settings_options
def profiles(settings: Settings) -> None:
    """Print the weights of each profile, and the threshold and review of the domain by its name.

    The default profile is that of all domains without one of their own; their thresholds may differ.
    """
    policy = settings.scoring.policy()
    for name, weights in policy.profiles.items():
        bounds = policy.bounds(name)
        row = {"profile": name, **weights.model_dump(), "threshold": bounds.threshold, "review": bounds.review}
        in_words = ", ".join(f"{dimension.replace('_', ' ')} {weight:.2f}" for dimension, weight in weights)
        review = "" if bounds.review is None else f", review {bounds.review:g}"
        print_row(row, f"{name}: {in_words}; threshold {bounds.threshold:g}{review}")
