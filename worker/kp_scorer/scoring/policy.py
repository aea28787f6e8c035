"""What an operator may choose about scoring: profiles, bounds, what a domain is taken for, and the cap of the step term."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

from kp_scorer.decision import Dimensions, Outcome, ThresholdSource
from kp_scorer.scoring.profiles import DEFAULT_PROFILE, PROFILES

DEFAULT_THRESHOLD: Final = 0.75
"""The reference SDK's threshold."""


class Bounds(NamedTuple):
    """From which scores a trace is accepted, and from which it is reviewed if it is not."""

    threshold: float
    source: ThresholdSource
    review: float | None

    def outcome(self, score: float) -> Outcome:
        """What becomes of a trace with this score."""
        if score >= self.threshold:
            return "accepted"
        return "rejected" if self.review is None or score < self.review else "review"


@dataclass(frozen=True, slots=True)
class Policy:
    """Profiles and bounds by domain, matched exactly; other domains get the defaults, or those of what they are taken for."""

    profiles: Mapping[str, Dimensions] = field(default_factory=lambda: PROFILES)
    threshold: float = DEFAULT_THRESHOLD
    thresholds: Mapping[str, float] = field(default_factory=dict)
    review: float | None = None
    """The score from which a trace that is not accepted goes to review; None has none reviewed."""
    reviews: Mapping[str, float] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Domains by the names that are taken for them; none of these has a profile or bounds of its own."""
    obeys_submissions: bool = False
    """Whether the threshold that a submission asks for counts, in place of the operator's."""
    cap_step_term: bool = False

    def profile(self, domain: str) -> str:
        """Name of the profile that weighs traces of ``domain``."""
        domain = self.aliases.get(domain, domain)
        return domain if domain in self.profiles else DEFAULT_PROFILE

    def bounds(self, domain: str, asked: float | None = None) -> Bounds:
        """From which scores a trace of ``domain`` is accepted or reviewed; its submission may have ``asked`` for a bound."""
        domain = self.aliases.get(domain, domain)
        threshold, source = self._threshold(domain, asked)
        review = self.reviews.get(domain, self.review)
        return Bounds(threshold, source, review if review is not None and review < threshold else None)

    def knows(self, domain: str) -> bool:
        """Whether anything is said of ``domain`` here. If not, its name may be misspelt."""
        return any(domain in named for named in (self.aliases, self.profiles, self.thresholds, self.reviews))

    def _threshold(self, domain: str, asked: float | None) -> tuple[float, ThresholdSource]:
        if self.obeys_submissions and asked is not None:
            return asked, "submission"
        if domain in self.thresholds:
            return self.thresholds[domain], "domain"
        return self.threshold, "default"


def fingerprint(*policies: Policy) -> str:
    """Eight hexadecimal digits that stand for these policies in this order."""
    said = [{each.name: getattr(policy, each.name) for each in fields(policy)} for policy in policies]
    # Mappings and weights come as pairs of names and values.
    text = json.dumps(said, sort_keys=True, default=dict)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
