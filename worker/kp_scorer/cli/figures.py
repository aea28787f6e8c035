"""Figures as people read them."""

from kp_scorer.analysis.suggestion import Share


def percent(share: float) -> str:
    """A share, 0..1, to a tenth of a percent."""
    return f"{100 * share:.1f}%"


def interval(share: Share) -> str:
    """Within what a share is to be expected, in whole percents."""
    return f"{100 * share.low:.0f}-{100 * share.high:.0f}%"
