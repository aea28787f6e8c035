"""Traces from others' records: parsed JSON in, traces as JSON out.

A record leads to a :class:`~kp_scorer.adapters.format.Format`, which leads to the messages and spans of a run. What those hold
is read alike for all formats.
"""

from kp_scorer.adapters.building import SuppliedFields
from kp_scorer.adapters.converter import Converter
from kp_scorer.adapters.formats import FORMATS, format_of
from kp_scorer.adapters.node import MOST_DEPTH

__all__ = ["FORMATS", "MOST_DEPTH", "Converter", "SuppliedFields", "format_of"]
