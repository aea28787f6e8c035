"""``kp-scorer reference``: print the configuration files that come with the package."""

from importlib import resources

import click

from kp_scorer.cli.output import print_text

_FILES = ("kp-scorer.toml", "redis.conf", "users.acl")


@click.command(epilog="Example: kp-scorer reference kp-scorer.toml > kp-scorer.toml")
@click.argument("file", type=click.Choice(_FILES))
def reference(file: str) -> None:
    """Print a configuration file to start from: every setting with its default, Redis' configuration, or its users."""
    print_text(resources.files("kp_scorer.reference").joinpath(file).read_text("utf-8"))
