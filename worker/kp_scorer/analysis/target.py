"""What thresholds are to reach, and how many traces it takes to say that they do."""

import math
from typing import Final, Literal, NamedTuple

Z: Final = 1.96
"""19 of 20 cases lie within so many standard deviations."""

_WIDEST: Final = 0.1
_WIDEST_PRECISION: Final = 0.15
"""What is less sure than this either way is worth nothing. A precision is of those alone that are accepted."""
_FEWEST: Final = 10
"""The fewest traces on one side of a threshold that say where it lies."""
_FEWEST_ACCEPTED: Final = 20
_ROUNDING: Final = 1e-9


class Target(NamedTuple):
    """A share, between 0 and 1, and what it is a share of."""

    of: Literal["accept", "precision"]
    """``accept``: of the traces, those that are accepted. ``precision``: of the accepted traces, those that are good."""
    share: float

    @property
    def percents(self) -> str:
        """The share as people write it."""
        return f"{100 * self.share:.6g}%"

    def traces_for(self, either_way: float) -> int:
        """How many traces it takes for what comes to be within ``either_way`` of the share, in 19 of 20 cases."""
        return math.ceil(self.share * (1 - self.share) * (Z / either_way) ** 2)

    @property
    def least_traces(self) -> int:
        """Of fewer traces, for a precision those with labels, nothing can be said."""
        return max(self.traces_for(_WIDEST), math.ceil(_FEWEST / min(self.share, 1 - self.share) - _ROUNDING))

    @property
    def least_accepted(self) -> int:
        """Of fewer accepted traces with labels no precision can be told."""
        return max(self.traces_for(_WIDEST_PRECISION), _FEWEST_ACCEPTED)
