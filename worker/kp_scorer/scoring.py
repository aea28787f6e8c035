"""The score of a trace: four dimensions, each in 0..1, their weighted sum, the overrides; and the policy that decides by it.

A pure function of a trace and its novelty, by the formulas of the KnowledgePulse reference SDK's ``evaluateValue``.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

from pydantic import BaseModel

from kp_scorer.decision import Decision, Dimensions, FiredOverride, Guard, NoveltySource, Outcome, Override, ThresholdSource
from kp_scorer.trace import STEP_TYPES, Domain, Fraction, ReasoningTrace

UNKNOWN_NOVELTY: Final = 0.5  # Novelty when there is nothing to compare with: an empty cache, or no embedder.
DEFAULT_THRESHOLD: Final = 0.75  # The reference SDK's threshold.
DEFAULT_PROFILE: Final = "default"
_STEPS_FOR_FULL_TERM: Final = 20

PROFILES: Final[Mapping[str, Dimensions]] = MappingProxyType(
    {
        DEFAULT_PROFILE: Dimensions(complexity=0.25, novelty=0.35, tool_diversity=0.15, outcome_confidence=0.25),
        "finance": Dimensions(complexity=0.20, novelty=0.25, tool_diversity=0.10, outcome_confidence=0.45),
        "code": Dimensions(complexity=0.20, novelty=0.30, tool_diversity=0.30, outcome_confidence=0.20),
        "medical": Dimensions(complexity=0.15, novelty=0.20, tool_diversity=0.10, outcome_confidence=0.55),
        "customer_service": Dimensions(complexity=0.20, novelty=0.30, tool_diversity=0.20, outcome_confidence=0.30),
    }
)
"""The reference SDK's; domains that are not among them get the default."""


class Bounds(NamedTuple):
    """The scores from which a trace is accepted, and from which it is reviewed otherwise; named as in a decision."""

    threshold: float
    threshold_source: ThresholdSource
    review: float | None

    def outcome(self, score: float, guards: Iterable[Guard] = (), demanded: Iterable[Outcome | None] = ()) -> Outcome:
        """The outcome of a trace with this score, unless a guard rejects it; or the strictest that is ``demanded``."""
        if any(guard.rejects for guard in guards):
            return "rejected"
        if score >= self.threshold:
            outcome: Outcome = "accepted"
        else:
            outcome = "rejected" if self.review is None or score < self.review else "review"
        return max((outcome, *(each for each in demanded if each)), key=get_args(Outcome).index)


class Policy(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False):
    """Profiles and bounds by domain, matched exactly after aliases are resolved; other domains get the defaults."""

    threshold: Fraction = DEFAULT_THRESHOLD
    thresholds: dict[Domain, Fraction] = {}
    review: Fraction | None = None  # The score from which a trace that is not accepted goes to review; None has none reviewed.
    reviews: dict[Domain, Fraction] = {}
    profiles: dict[Domain, Dimensions] = dict(PROFILES)
    aliases: dict[Domain, str] = {}  # Domains by their aliases; no alias has a profile or bounds of its own.
    submitted_thresholds: bool = False  # Whether the threshold that a submission asks for replaces the operator's.
    cap_step_term: bool = False
    max_confidence: Fraction = 1.0  # What a producer says of its own confidence counts up to this.
    min_novelty: Fraction = 0.0  # A trace that is less novel is rejected. Unknown novelty passes.
    min_novelties: dict[Domain, Fraction] = {}
    copies: Literal["score", "reject"] = "score"  # What happens to a trace whose content another one in the window has.

    def profile(self, domain: str) -> str:
        """Name of the profile that weighs traces of ``domain``."""
        domain = self.aliases.get(domain, domain)
        return domain if domain in self.profiles else DEFAULT_PROFILE

    def bounds(self, domain: str, asked: float | None = None) -> Bounds:
        """The bounds for a trace of ``domain``; its submission may have ``asked`` for a threshold."""
        domain = self.aliases.get(domain, domain)
        source: ThresholdSource = "domain" if domain in self.thresholds else "default"
        threshold = self.thresholds.get(domain, self.threshold)
        if self.submitted_thresholds and asked is not None:
            threshold, source = asked, "submission"
        review = self.reviews.get(domain, self.review)
        return Bounds(threshold, source, review if review is not None and review < threshold else None)

    def guard_confidence(self, confidence: float) -> Iterator[Guard]:
        """The guard against a trace that states ``confidence`` of itself."""
        if self.max_confidence < 1:
            yield Guard(name="max_confidence", bound=self.max_confidence, fired=confidence > self.max_confidence)

    def guard_novelty(self, domain: str, value: float, source: NoveltySource, *, is_copy: bool) -> Iterator[Guard]:
        """The guards against a trace of ``domain`` whose novelty is ``value``; they reject it when they fire."""
        floor = self.min_novelties.get(self.aliases.get(domain, domain), self.min_novelty)
        if floor:
            yield Guard(name="min_novelty", bound=floor, fired=source == "embedding" and value < floor)
        if self.copies == "reject":
            yield Guard(name="copies", fired=is_copy)

    @property
    def domains(self) -> frozenset[str]:
        """The domains that it names, also as aliases; the names of others may be misspelt."""
        return frozenset().union(self.aliases, self.profiles, self.thresholds, self.reviews, self.min_novelties)


def check_weights(weights: Dimensions) -> Dimensions:
    """Return the weights if they sum to 1 (each is in 0..1 by its type); raise ValueError otherwise."""
    total = math.fsum((weights.complexity, weights.novelty, weights.tool_diversity, weights.outcome_confidence))
    if not math.isclose(total, 1.0, abs_tol=1e-9):
        raise ValueError(f"weights must sum to 1, these sum to {total:g}")
    return weights


class ComplexityTerms(NamedTuple):
    """The terms whose sum is complexity, before it is limited to 1."""

    types: float  # 0.5 for all four types of steps, in equal parts.
    recovery: float  # 0.3 if any step recovers from an error.
    steps: float  # 0.2 for every 20 steps.


class Score(NamedTuple):
    """A score and the parts it is computed from, named as in a decision."""

    score: float  # 0..1, after the overrides.
    dimensions: Dimensions
    profile: str
    weights: Dimensions
    composite: float  # The weighted sum, 0..1, before the overrides.
    overrides: tuple[FiredOverride, ...]


def score(trace: ReasoningTrace, novelty: float, policy: Policy) -> Score:
    """Score a trace whose novelty (0..1) is known."""
    parts = dimensions(trace, novelty, cap_step_term=policy.cap_step_term, max_confidence=policy.max_confidence)
    return _score(trace.metadata.task_domain, parts, _overrides(trace), policy)


def decide_again(decision: Decision, policy: Policy) -> Decision:
    """Decide a trace again by another policy, from its decision.

    What depends on the trace itself stays: its dimensions, whatever ``policy.cap_step_term`` and ``policy.max_confidence`` are,
    which overrides fire, what pinned sets demand, and the threshold that its submission asked for, if that applied.
    """
    scored = _score(decision.domain, decision.dimensions, (fired.name for fired in decision.overrides), policy)
    bounds = policy.bounds(decision.domain, decision.threshold if decision.threshold_source == "submission" else None)
    novelty = decision.novelty
    # A decision that names no other trace still has the guard that fired.
    is_copy = novelty.duplicate_of is not None or any(guard.fired for guard in decision.guards if guard.name == "copies")
    guards = (
        *(guard for guard in decision.guards if guard.name == "max_confidence"),
        *policy.guard_novelty(decision.domain, decision.dimensions.novelty, novelty.source, is_copy=is_copy),
    )
    outcome, taken_for = bounds.outcome(scored.score, guards, decision.demanded), policy.aliases.get(decision.domain)
    changed = {"outcome": outcome, "taken_for": taken_for, "guards": guards}
    return decision.model_copy(update=changed | scored._asdict() | bounds._asdict())


def novelty_of(similarity: float | None) -> float:
    """Novelty, 0..1, from the largest cosine similarity to an earlier trace; None if there is nothing to compare with."""
    return UNKNOWN_NOVELTY if similarity is None else min(1.0, max(0.0, 1.0 - similarity))


def dimensions(
    trace: ReasoningTrace, novelty: float, *, cap_step_term: bool = False, max_confidence: float = 1.0
) -> Dimensions:
    """Compute the dimensions of a trace whose novelty (0..1) is known.

    ``cap_step_term`` limits the step term of complexity to what 20 steps give, ``max_confidence`` the confidence that the trace
    states of itself; the reference has no such limits.
    """
    terms = complexity_terms(trace, cap_step_term=cap_step_term)
    return Dimensions(
        complexity=min(1.0, terms.types + terms.recovery + terms.steps),
        novelty=novelty,
        tool_diversity=min(1.0, len(tool_names(trace)) / max(1, len(trace.steps)) * 3),
        outcome_confidence=min(trace.outcome.confidence, max_confidence) * success_factor(trace),
    )


def tool_names(trace: ReasoningTrace) -> set[str]:
    """Names of the tools used; any step may name one, and the same name on two servers is one tool."""
    return {step.tool.name for step in trace.steps if step.tool is not None}


def recoveries(trace: ReasoningTrace) -> int:
    """How many steps recover from an error."""
    return sum(step.type == "error_recovery" for step in trace.steps)


def success_factor(trace: ReasoningTrace) -> float:
    """The factor of the confidence: a failure leaves three tenths of it."""
    return 1.0 if trace.metadata.success else 0.3


def complexity_terms(trace: ReasoningTrace, *, cap_step_term: bool = False) -> ComplexityTerms:
    """The terms of a trace's complexity, before their sum is limited to 1."""
    types = {step.type for step in trace.steps}
    steps = min(len(trace.steps), _STEPS_FOR_FULL_TERM) if cap_step_term else len(trace.steps)
    recovery = 0.3 if recoveries(trace) else 0.0
    return ComplexityTerms(len(types) / len(STEP_TYPES) * 0.5, recovery, steps / _STEPS_FOR_FULL_TERM * 0.2)


def _score(domain: str, parts: Dimensions, overrides: Iterable[Override], policy: Policy) -> Score:
    profile = policy.profile(domain)
    weights = policy.profiles[profile]
    total = (
        parts.complexity * weights.complexity
        + parts.novelty * weights.novelty
        + parts.tool_diversity * weights.tool_diversity
        + parts.outcome_confidence * weights.outcome_confidence
    )
    # Four dimensions of 1 can sum to 1 + 2e-16, which is not a valid score.
    value = composite = min(1.0, total)
    fired: list[FiredOverride] = []
    for name in overrides:
        value = _AFTER[name](value)
        fired.append(FiredOverride(name=name, score=value))
    return Score(value, parts, profile, weights, composite, tuple(fired))


_AFTER: Final[Mapping[Override, Callable[[float], float]]] = {
    "single_thought": lambda _: 0.1,
    "recovered_from_errors": lambda value: min(1.0, value + 0.1),
    "single_tool": lambda value: max(0.0, value - 0.1),
}
"""The score after each override, by the score before it."""


def _overrides(trace: ReasoningTrace) -> Iterator[Override]:
    """The rules that change the score of a trace, in the order in which they apply."""
    if len(trace.steps) == 1 and trace.steps[0].type == "thought":
        yield "single_thought"
    if recoveries(trace) > 2 and trace.metadata.success:
        yield "recovered_from_errors"
    if len(tool_names(trace)) == 1:
        yield "single_tool"
