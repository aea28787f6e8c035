"""Converts the logs of other tools to traces: parsed JSON in, traces as JSON out.

A :class:`~kp_scorer.adapters.format.Format` finds the records of each run, and the messages or spans in them. The same code
reads the messages and spans of all formats.
"""

from kp_scorer.adapters.building import Run, SuppliedFields
from kp_scorer.adapters.converter import ConvertedRun, Converter
from kp_scorer.adapters.formats import FORMATS, format_of
from kp_scorer.adapters.node import MOST_DEPTH

__all__ = ["FORMATS", "MOST_DEPTH", "ConvertedRun", "Converter", "Run", "SuppliedFields", "format_of"]
