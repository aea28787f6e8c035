"""A run of the suite as a whole."""

from typing import Final

RUN: Final = "TEST_RUN"
"""The variable with the number of a run, which all its processes have."""
