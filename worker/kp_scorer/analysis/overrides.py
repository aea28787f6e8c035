"""How often the rules that change a score have fired."""

from collections import Counter
from collections.abc import Mapping
from typing import Final, get_args

from kp_scorer.analysis.domains import Domain
from kp_scorer.decision import Override

OVERRIDES: Final[tuple[Override, ...]] = get_args(Override)


def overrides_of(domain: Domain) -> Mapping[Override, int]:
    """How many traces of a domain each override changed the score of; every override is named."""
    fired = Counter(override.name for decision in domain.decisions for override in decision.overrides)
    return {name: fired[name] for name in OVERRIDES}
