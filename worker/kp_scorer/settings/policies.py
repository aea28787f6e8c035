"""The sections that describe a scoring policy: the one that traces are decided by, and the shadow."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kp_scorer.decision import Dimensions
from kp_scorer.scoring import DEFAULT_THRESHOLD, PROFILES, Policy, check_weights
from kp_scorer.settings.sections import Section
from kp_scorer.trace import Fraction


class PolicySettings(Section):
    """Thresholds, weights, and what domains are taken for."""

    threshold: Fraction = DEFAULT_THRESHOLD
    thresholds: dict[str, Fraction] = Field(default_factory=dict)
    review: Fraction | None = None
    reviews: dict[str, Fraction] = Field(default_factory=dict)
    profiles: dict[str, Dimensions] = Field(default_factory=dict)
    aliases: dict[str, str] = Field(default_factory=dict)

    @field_validator("profiles")
    @classmethod
    def _weights_sum_to_one(cls, profiles: dict[str, Dimensions]) -> dict[str, Dimensions]:
        for name, weights in profiles.items():
            try:
                check_weights(weights)
            except ValueError as error:
                raise ValueError(f"profile {name!r}: {error}") from None
        return profiles

    @model_validator(mode="after")
    def _reviews_are_below_thresholds(self) -> Self:
        # One that is above would have nothing reviewed, and nobody would know why.
        if clashes := list(self.reviews_above(self.threshold, self.thresholds)):
            raise ValueError("; ".join(clashes))
        return self

    @model_validator(mode="after")
    def _aliases_lead_to_what_has_something_of_its_own(self) -> Self:
        own = {*PROFILES, *self.profiles, *self.thresholds, *self.reviews}
        for alias, domain in self.aliases.items():
            if alias in own:
                raise ValueError(f"aliases.{alias}: expected a name without a profile, a threshold or a review of its own")
            if domain not in own:
                # Nor may it be an alias, so that one look tells what a domain is taken for.
                raise ValueError(f"aliases.{alias}: expected a domain with a profile, a threshold or a review, got {domain!r}")
        return self

    def reviews_above(self, default: float, thresholds: Mapping[str, float]) -> Iterator[str]:
        """Say of each review that is above one of these thresholds what is wrong with it."""
        for domain in dict.fromkeys(("", *thresholds, *self.reviews)):
            threshold, review = thresholds.get(domain, default), self.reviews.get(domain, self.review)
            if review is not None and review > threshold:
                where = f"reviews.{domain}" if domain else "review"
                yield f"{where}: expected at most the threshold of {threshold:g}, got {review:g}"

    def _policy(self) -> Policy:
        """The scoring policy these settings describe; profiles given here are added to, or replace, the built-in ones."""
        return Policy(
            profiles={**PROFILES, **self.profiles},
            threshold=self.threshold,
            thresholds=self.thresholds,
            review=self.review,
            reviews=self.reviews,
            aliases=self.aliases,
        )


class ScoringSettings(PolicySettings):
    """How traces are decided."""

    submitted_thresholds: bool = False
    cap_step_term: bool = False

    @property
    def reviews_any(self) -> bool:
        """Whether any trace can go to review."""
        return self.review is not None or bool(self.reviews)

    @property
    def domains(self) -> frozenset[str]:
        """Those that settings name: with a profile or a bound of their own, or as an alias."""
        return frozenset({*PROFILES, *self.profiles, *self.thresholds, *self.reviews, *self.aliases})

    def policy(self) -> Policy:
        """The policy that traces are decided by."""
        return replace(self._policy(), obeys_submissions=self.submitted_thresholds, cap_step_term=self.cap_step_term)


class ShadowSettings(PolicySettings):
    """A second policy, by which all is decided once more to see what it would change."""

    enabled: bool = False
    via: Literal["queue", "none"] = "none"

    @property
    def is_published(self) -> bool:
        """Whether what the shadow decides goes anywhere."""
        return self.enabled and self.via == "queue"

    def policy(self) -> Policy | None:
        """The shadow's policy; None if there is no shadow."""
        # It is given decisions, which say what a submission has asked for only if that was obeyed: then it obeys too.
        return replace(self._policy(), obeys_submissions=True) if self.enabled else None
