"""The command line: ``kp-scorer``."""

from worker.cli.main import main

__all__ = ["main"]
