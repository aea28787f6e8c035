"""The command line: ``kp-scorer``."""

from kp_scorer.cli.main import main

__all__ = ["main"]
