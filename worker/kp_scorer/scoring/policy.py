"""What an operator may choose about scoring: profiles, thresholds and the cap of the step term."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kp_scorer.decision import Dimensions
from kp_scorer.scoring.profiles import DEFAULT_PROFILE, PROFILES

DEFAULT_THRESHOLD: Final = 0.75
"""The reference SDK's threshold."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Profiles and thresholds by domain, matched exactly; other domains get the defaults."""

    profiles: Mapping[str, Dimensions] = field(default_factory=lambda: PROFILES)
    threshold: float = DEFAULT_THRESHOLD
    thresholds: Mapping[str, float] = field(default_factory=dict)
    cap_step_term: bool = False

    def profile(self, domain: str) -> str:
        """Name of the profile that weighs traces of ``domain``."""
        return domain if domain in self.profiles else DEFAULT_PROFILE

    def threshold_for(self, domain: str) -> tuple[float, Literal["default", "domain"]]:
        """The score from which a trace of ``domain`` is accepted, and where that number comes from."""
        if domain in self.thresholds:
            return self.thresholds[domain], "domain"
        return self.threshold, "default"
