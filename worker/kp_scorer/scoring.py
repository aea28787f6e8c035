"""Scores a trace by four dimensions, each in 0..1, their weighted sum and the overrides, and decides by a policy.

The score is a pure function of a trace and its novelty, by the formulas of the KnowledgePulse reference SDK's
``evaluateValue``.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

from pydantic import BaseModel

from kp_scorer.decision import (
    FAILURE_FACTOR,
    Decision,
    Dimensions,
    FiredOverride,
    GateResult,
    Guard,
    NoveltySource,
    Outcome,
    Override,
    RevisedBy,
    Superseded,
    ThresholdSource,
)
from kp_scorer.trace import STEP_TYPES, Domain, Fraction, LateOutcome, ReasoningTrace

UNKNOWN_NOVELTY: Final = 0.5  # The novelty if there is nothing to compare with: the cache is empty, or there is no embedder.
DEFAULT_THRESHOLD: Final = 0.75  # The reference SDK's threshold.
DEFAULT_PROFILE: Final = "default"
_STEPS_FOR_FULL_TERM: Final = 20
_RECOVERIES_WITHOUT_BONUS: Final = 2  # A success after more recoveries scores higher.

PROFILES: Final[Mapping[str, Dimensions]] = MappingProxyType(
    {
        DEFAULT_PROFILE: Dimensions(complexity=0.25, novelty=0.35, tool_diversity=0.15, outcome_confidence=0.25),
        "finance": Dimensions(complexity=0.20, novelty=0.25, tool_diversity=0.10, outcome_confidence=0.45),
        "code": Dimensions(complexity=0.20, novelty=0.30, tool_diversity=0.30, outcome_confidence=0.20),
        "medical": Dimensions(complexity=0.15, novelty=0.20, tool_diversity=0.10, outcome_confidence=0.55),
        "customer_service": Dimensions(complexity=0.20, novelty=0.30, tool_diversity=0.20, outcome_confidence=0.30),
    }
)
"""The profiles of the reference SDK. Other domains get the default."""


class Bounds(NamedTuple):
    """The score from which a trace is accepted, and the lower one from which it is reviewed; named as in a decision."""

    threshold: float
    threshold_source: ThresholdSource
    review: float | None

    def outcome(
        self,
        score: float,
        guards: Iterable[Guard] = (),
        demanded: Iterable[Outcome | None] = (),
        gate: GateResult | None = None,
    ) -> Outcome:
        """Return the strictest of the outcomes that are ``demanded`` or that the score gives; rejected if a guard rejects.

        If there is a gate, it decides in place of the threshold whether the trace is accepted.
        """
        if any(guard.rejects for guard in guards):
            return "rejected"
        if gate.accepts if gate else score >= self.threshold:
            outcome: Outcome = "accepted"
        else:
            outcome = "rejected" if self.review is None or score < self.review else "review"
        return max((outcome, *(each for each in demanded if each)), key=get_args(Outcome).index)


class Policy(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False):
    """Profiles and bounds by domain, which is matched exactly after aliases are resolved. Other domains get the defaults."""

    threshold: Fraction = DEFAULT_THRESHOLD
    thresholds: dict[Domain, Fraction] = {}
    review: Fraction | None = None  # From this score on, a trace that is not accepted goes to review.
    reviews: dict[Domain, Fraction] = {}
    profiles: dict[Domain, Dimensions] = dict(PROFILES)
    aliases: dict[Domain, str] = {}  # The domain of each alias. An alias has no profile or bounds of its own.
    submitted_thresholds: bool = False  # True if the threshold that a submission requests replaces the operator's.
    cap_step_term: bool = False
    max_confidence: Fraction = 1.0  # Any larger confidence that a trace states counts as this.
    min_novelty: Fraction = 0.0  # A less novel trace is rejected. An unknown novelty passes.
    min_novelties: dict[Domain, Fraction] = {}
    copies: Literal["score", "reject"] = "score"  # The treatment of a copy of another trace in its window.

    def profile(self, domain: str) -> str:
        """Return the name of the profile that weighs traces of ``domain``."""
        domain = self.aliases.get(domain, domain)
        return domain if domain in self.profiles else DEFAULT_PROFILE

    def bounds(self, domain: str, requested: float | None = None) -> Bounds:
        """Return the bounds for a trace of ``domain``, whose submission may have ``requested`` a threshold."""
        domain = self.aliases.get(domain, domain)
        source: ThresholdSource = "domain" if domain in self.thresholds else "default"
        threshold = self.thresholds.get(domain, self.threshold)
        if self.submitted_thresholds and requested is not None:
            threshold, source = requested, "submission"
        review = self.reviews.get(domain, self.review)
        return Bounds(threshold, source, review if review is not None and review < threshold else None)

    def guard_confidence(self, confidence: float) -> Iterator[Guard]:
        """Yield the guard on the confidence that a trace states, if the policy limits it."""
        if self.max_confidence < 1:
            yield Guard(name="max_confidence", bound=self.max_confidence, fired=confidence > self.max_confidence)

    def guard_novelty(self, domain: str, value: float, source: NoveltySource, *, is_copy: bool) -> Iterator[Guard]:
        """Yield the guards against a novelty of ``value`` in ``domain``, which reject the trace if they fire."""
        floor = self.min_novelties.get(self.aliases.get(domain, domain), self.min_novelty)
        if floor:
            yield Guard(name="min_novelty", bound=floor, fired=source == "embedding" and value < floor)
        if self.copies == "reject":
            yield Guard(name="copies", fired=is_copy)

    @property
    def domains(self) -> frozenset[str]:
        """All domains and aliases that this policy names. Any other name may be a misspelling."""
        return frozenset().union(self.aliases, self.profiles, self.thresholds, self.reviews, self.min_novelties)


def check_weights(weights: Dimensions) -> Dimensions:
    """Return weights, each of which is in 0..1 by its type, if they sum to 1; raise ValueError otherwise."""
    total = math.fsum((weights.complexity, weights.novelty, weights.tool_diversity, weights.outcome_confidence))
    if not math.isclose(total, 1.0, abs_tol=1e-9):
        raise ValueError(f"weights must sum to 1, these sum to {total:g}")
    return weights


class ComplexityTerms(NamedTuple):
    """The terms whose sum is complexity, before it is limited to 1."""

    types: float  # 0.125 for each of the four types of steps that occurs.
    recovery: float  # 0.3 if any step recovers from an error.
    steps: float  # 0.01 for each step, up to 0.2 if it is capped.


class Score(NamedTuple):
    """A score and the parts that it is computed from, named as in a decision."""

    score: float  # 0..1, after the overrides.
    dimensions: Dimensions
    profile: str
    weights: Dimensions
    composite: float  # The weighted sum, 0..1, before the overrides.
    overrides: tuple[FiredOverride, ...]


def score(trace: ReasoningTrace, novelty: float, policy: Policy) -> Score:
    """Score a trace whose novelty (0..1) is known."""
    parts = dimensions(trace, novelty, cap_step_term=policy.cap_step_term, max_confidence=policy.max_confidence)
    profile = policy.profile(trace.metadata.task_domain)
    return _score(profile, policy.profiles[profile], parts, _overrides(trace))


def decide_again(decision: Decision, policy: Policy) -> Decision:
    """Decide a trace again by another policy, from its decision.

    Everything that depends on the trace itself stays: its dimensions, whatever ``policy.cap_step_term`` and
    ``policy.max_confidence`` are; the overrides that fire; the demands of pinned sets and checks; the result of the gate; and
    the threshold that the submission requested, if that applied.
    """
    overrides = (fired.name for fired in decision.overrides)
    profile = policy.profile(decision.domain)
    scored = _score(profile, policy.profiles[profile], decision.dimensions, overrides)
    bounds = policy.bounds(decision.domain, decision.threshold if decision.threshold_source == "submission" else None)
    novelty = decision.novelty
    # The decision may not name the other trace, but it has the guard that fired.
    is_copy = novelty.duplicate_of is not None or any(guard.fired for guard in decision.guards if guard.name == "copies")
    guards = (
        *(guard for guard in decision.guards if guard.name == "max_confidence"),
        *policy.guard_novelty(decision.domain, decision.dimensions.novelty, novelty.source, is_copy=is_copy),
    )
    outcome = bounds.outcome(scored.score, guards, decision.demanded, decision.gate)
    taken_for = policy.aliases.get(decision.domain)
    changed = {"outcome": outcome, "taken_for": taken_for, "guards": guards}
    return decision.model_copy(update=changed | scored._asdict() | bounds._asdict())


def revise(decision: Decision, late: LateOutcome, admits: Callable[[bool, float], bool]) -> Decision:
    """Decide a trace again by a late outcome: a pure function of the decision and the outcome. Weights and bounds stay.

    ``admits`` takes a success and an outcome dimension, and returns whether they meet the requirement of the gate. The decision
    must have ``stated``.
    """
    assert decision.stated, "the caller has checked it"
    confidence = decision.stated.confidence if late.confidence is None else late.confidence
    bounded = min(confidence, decision.bound("max_confidence"))
    parts = decision.dimensions.model_copy(update={"outcome_confidence": bounded * success_factor(late.success)})
    fired = {each.name for each in decision.overrides} - {"recovered_from_errors"}
    if late.success and decision.stated.recoveries > _RECOVERIES_WITHOUT_BONUS:
        fired.add("recovered_from_errors")
    scored = _score(decision.profile, decision.weights, parts, (name for name in _EFFECTS if name in fired))
    guards = tuple(
        guard.model_copy(update={"fired": confidence > bounded}) if guard.name == "max_confidence" else guard
        for guard in decision.guards
    )
    gate = decision.gate and decision.gate.model_copy(update={"eligible": admits(late.success, parts.outcome_confidence)})
    bounds = Bounds(decision.threshold, decision.threshold_source, decision.review)
    changed = {
        "revision": decision.revision + 1,
        "supersedes": Superseded(
            revision=decision.revision, outcome=decision.outcome, score=decision.score, decided_at=decision.decided_at
        ),
        "revised_by": RevisedBy(**late.model_dump(include={"id", "success", "confidence", "reason"})),
        "outcome": bounds.outcome(scored.score, guards, decision.demanded, gate),
        "guards": guards,
        "gate": gate,
    }
    return decision.model_copy(update=changed | scored._asdict())


def novelty_of(similarity: float | None) -> float:
    """Return the novelty, 0..1, for the largest cosine similarity to an earlier trace; None means that there is none."""
    return UNKNOWN_NOVELTY if similarity is None else min(1.0, max(0.0, 1.0 - similarity))


def dimensions(
    trace: ReasoningTrace, novelty: float, *, cap_step_term: bool = False, max_confidence: float = 1.0
) -> Dimensions:
    """Compute the dimensions of a trace whose novelty (0..1) is known.

    ``cap_step_term`` limits the step term of complexity to that of 20 steps, and ``max_confidence`` limits the confidence that
    the trace states. The reference has no such limits.
    """
    terms = complexity_terms(trace, cap_step_term=cap_step_term)
    return Dimensions(
        complexity=min(1.0, terms.types + terms.recovery + terms.steps),
        novelty=novelty,
        tool_diversity=min(1.0, len(tool_names(trace)) / max(1, len(trace.steps)) * 3),
        outcome_confidence=min(trace.outcome.confidence, max_confidence) * success_factor(trace.metadata.success),
    )


def tool_names(trace: ReasoningTrace) -> set[str]:
    """Return the names of the tools used. Any step may name one, and the same name on two servers is one tool."""
    return {step.tool.name for step in trace.steps if step.tool is not None}


def recoveries(trace: ReasoningTrace) -> int:
    """Return the number of steps that recover from an error."""
    return sum(step.type == "error_recovery" for step in trace.steps)


def success_factor(success: bool) -> float:
    """Return the factor by which the outcome dimension multiplies a confidence: 1 for a success, 0.3 for a failure."""
    return 1.0 if success else FAILURE_FACTOR


def complexity_terms(trace: ReasoningTrace, *, cap_step_term: bool = False) -> ComplexityTerms:
    """Return the terms of a trace's complexity, before their sum is limited to 1."""
    types = {step.type for step in trace.steps}
    steps = min(len(trace.steps), _STEPS_FOR_FULL_TERM) if cap_step_term else len(trace.steps)
    recovery = 0.3 if recoveries(trace) else 0.0
    return ComplexityTerms(len(types) / len(STEP_TYPES) * 0.5, recovery, steps / _STEPS_FOR_FULL_TERM * 0.2)


def _score(profile: str, weights: Dimensions, parts: Dimensions, overrides: Iterable[Override]) -> Score:
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
        value = _EFFECTS[name](value)
        fired.append(FiredOverride(name=name, score=value))
    return Score(value, parts, profile, weights, composite, tuple(fired))


_EFFECTS: Final[Mapping[Override, Callable[[float], float]]] = {
    "single_thought": lambda _: 0.1,
    "recovered_from_errors": lambda value: min(1.0, value + 0.1),
    "single_tool": lambda value: max(0.0, value - 0.1),
}
"""The effect of each override: a function from the score before it to the score after it, in the order of application."""


def _overrides(trace: ReasoningTrace) -> Iterator[Override]:
    """Yield the rules that change the score of a trace, in the order in which they apply."""
    if len(trace.steps) == 1 and trace.steps[0].type == "thought":
        yield "single_thought"
    if recoveries(trace) > _RECOVERIES_WITHOUT_BONUS and trace.metadata.success:
        yield "recovered_from_errors"
    if len(tool_names(trace)) == 1:
        yield "single_tool"
