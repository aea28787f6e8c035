"""Builders of traces and their JSON, decisions, policies, candidates and embedders; each call takes one line."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import getitem
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st
from kp_scorer.broker.queues import SubmissionQueues, submission_queues
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision, Dimensions, FiredOverride, Nearest, Novelty, Override, Timings
from kp_scorer.decoding import check_trace, decode_trace, parse_json
from kp_scorer.embedding.embedder import Embedder
from kp_scorer.embedding.select import select_embedder
from kp_scorer.limits import Limits
from kp_scorer.novelty import Candidate
from kp_scorer.scoring import PROFILES, Bounds, Policy
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import EmbeddingSettings, RecipeName
from kp_scorer.store import Store
from kp_scorer.store.records import Identity, MemoryLedger, Verdict
from kp_scorer.trace import STEP_TYPES, ReasoningTrace

LIMITS: Final = Limits()
BUILT_IN_DOMAINS: Final = ("finance", "code", "medical", "customer_service")
MIDDLING: Final = Dimensions(complexity=0.6, novelty=0.4, tool_diversity=0.5, outcome_confidence=0.8)
OWN_WEIGHTS: Final = Dimensions(complexity=0.0, novelty=0.6, tool_diversity=0.3, outcome_confidence=0.1)
MINUTE_MS: Final = 60_000
COMPLETE_DECISION: Final = """
{"schema_version":1,"trace_id":"kp:trace:full","domain":"law","taken_for":"legal","outcome":"review","score":0.61,"threshold":0.72,
"threshold_source":"submission","review":0.53,
"dimensions":{"complexity":0.11,"novelty":0.12,"tool_diversity":0.13,"outcome_confidence":0.14},"profile":"justice",
"weights":{"complexity":0.21,"novelty":0.22,"tool_diversity":0.23,"outcome_confidence":0.34},"composite":0.62,
"overrides":[{"name":"recovered_from_errors","score":0.61},{"name":"single_tool","score":0.61}],
"novelty":{"source":"embedding","nearest":{"trace_id":"kp:trace:near","similarity":0.88},"duplicate_of":"kp:trace:first",
"embedder":"MiniLM","embedded_tokens":77,"unknown_tokens":7,"text_tokens":77,"space":"0123456789abcdef","entry":"1767225600000-7"},
"received":{"worker":"scorer-1@host","queued_ms":1234,"deliveries":2},
"timings":{"held_ms":0.5,"look_up_ms":1.5,"wait_ms":4.5,"embed_ms":2.5,"place_ms":3.5,"batch_size":9},"decided_at":"2026-03-04T05:06:07.890+02:00"}
"""
"""A decision with a value in every field, as the ledger and the queues hold it."""

Payload = dict[str, Any]


def step(kind: str, tool: str | None = None, content: str | None = None, **fields: Any) -> Payload:
    """Return one step as JSON; its ``step_id`` is 0 unless given."""
    payload: Payload = {"step_id": 0, "type": kind, **fields}
    if content is not None:
        payload["content"] = content
    if tool is not None:
        payload["tool"] = {"name": tool}
    return payload


def steps(*types: str) -> list[Payload]:
    return [step(kind) for kind in types]


def minimal_payload(
    *,
    trace_id: str = "kp:trace:minimal",
    domain: str = "default",
    success: bool = True,
    confidence: float = 1.0,
    objective: str = "count the open invoices",
    steps: Sequence[Payload] = ({"step_id": 0, "type": "thought"}, {"step_id": 1, "type": "observation"}),
) -> Payload:
    return {
        "@context": "https://openknowledgepulse.org/schema/v1",
        "@type": "ReasoningTrace",
        "id": trace_id,
        "metadata": {
            "created_at": "2026-01-01T00:00:00Z",
            "task_domain": domain,
            "success": success,
            "visibility": "network",
            "privacy_level": "aggregated",
        },
        "task": {"objective": objective},
        "steps": [dict(item) for item in steps],
        "outcome": {"result_summary": "done", "confidence": confidence},
    }


def maximal_payload() -> Payload:
    payload = minimal_payload(trace_id="kp:trace:maximal", confidence=0.9)
    payload["metadata"] |= {
        "quality_score": 0.4,
        "agent_id": "kp:agent:clerk",
        "framework": "LangGraph",
        "validated_by": ["kp:agent:first", "kp:agent:second"],
    }
    payload["task"]["input_schema"] = {"type": "object", "required": ["month"]}
    payload["steps"] = [
        {
            "step_id": 0,
            "type": "tool_call",
            "content": "ask the ledger",
            "tool": {"name": "sql", "mcp_server": "warehouse"},
            "input": {"query": "select 1", "limits": [1, 2.5, None, True]},
            "output_summary": "one row",
            "latency_ms": 12.5,
        },
        {"step_id": 1, "type": "observation", "content": "the row is right"},
    ]
    payload["source_skill"] = "kp:skill:invoices"
    payload["knowledge_graph_delta"] = {
        "entities": [{"name": "ACME", "type": "supplier"}],
        "relationships": [{"fact": "ACME is paid monthly", "valid_from": "2026-01-01"}],
    }
    return payload


def decode_json(raw: bytes, limits: Limits) -> ReasoningTrace:
    """Parse and check the JSON of a trace, as a worker does with a message."""
    return check_trace(parse_json(raw, limits), limits)


def make_trace(**overrides: Any) -> ReasoningTrace:
    return decode_trace(minimal_payload(**overrides), LIMITS)


def decided(trace: ReasoningTrace, policy: Policy | None = None) -> Decision:
    """Decide a trace without an embedder, by the default policy unless another is given."""
    (result,) = Decider(MemoryLedger(), policy or Policy(), None, max_attempts=5).decide([trace])
    assert isinstance(result, Decision)
    return result


@cache
def decision_on(trace_id: str) -> bytes:
    """Return a decision on a small trace with this id, in the bytes that the ledger stores."""
    return decided(make_trace(trace_id=trace_id)).model_dump_json().encode()


def store_decisions(store: Store, decisions: Mapping[str, bytes], digest: bytes = bytes(16)) -> None:
    """Have the ledger store decisions, given by trace id in the bytes that it stores."""
    store.ledger.acquire([Identity(trace_id, digest) for trace_id in decisions])
    verdicts = [Verdict(trace_id, digest, stored, "", "code", is_known=True) for trace_id, stored in decisions.items()]
    store.ledger.commit(verdicts)


def keys_of(path: str) -> list[str | int]:
    """Return the keys of a dotted path: names, and numbers for positions in a list."""
    return [int(key) if key.isdigit() else key for key in path.split(".")]


def leaves(value: object, path: str = "") -> dict[str, object]:
    """Return every value in JSON that is neither an object nor a list, by its dotted path."""
    if not isinstance(value, dict | list):
        return {path: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return {leaf: part for key, inner in parts for leaf, part in leaves(inner, f"{path}.{key}".lstrip(".")).items()}


def changed(payload: Payload, path: str, value: object) -> Payload:
    copied, *outer, last = copy.deepcopy(payload), *keys_of(path)
    _holder(copied, outer)[last] = value
    return copied


def without(payload: Payload, path: str) -> Payload:
    copied, *outer, last = copy.deepcopy(payload), *keys_of(path)
    del _holder(copied, outer)[last]
    return copied


def _holder(payload: Any, outer: Sequence[Any]) -> Any:
    return reduce(getitem, outer, payload)


def policies(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Policy]:
    """Return a strategy for policies with all kinds of weights and bounds; ``fields`` adds strategies for other fields."""
    return st.builds(
        Policy,
        profiles=st.just(PROFILES) | st.just({**PROFILES, "code": OWN_WEIGHTS}),
        threshold=st.floats(0, 1) | st.sampled_from([0.0, 0.1, 0.75, 1.0]),
        thresholds=st.dictionaries(st.sampled_from(["code", "finance"]), st.floats(0, 1)),
        review=st.none() | st.floats(0, 1),
        aliases=st.dictionaries(st.sampled_from(["travel", "finance"]), st.sampled_from(["code", "medical"])),
        **fields,
    )


def traces() -> st.SearchStrategy[ReasoningTrace]:
    tools = st.none() | st.sampled_from(["sql", "search", "mail", "Sql", ""])
    one_step = st.builds(step, st.sampled_from(STEP_TYPES), tools, st.none() | st.text("ab ", max_size=5))
    return st.builds(
        make_trace,
        domain=st.sampled_from([*BUILT_IN_DOMAINS, "default", "travel"]),
        success=st.booleans(),
        confidence=st.floats(0, 1),
        steps=st.lists(one_step, min_size=1, max_size=30),
    )


def decision(
    trace_id: str = "kp:trace:0",
    *,
    score: float = 0.5,
    threshold: float = 0.75,
    review: float | None = None,
    domain: str = "code",
    novelty: float = 0.4,
    nearest: tuple[str, float] | None = None,
    duplicate_of: str | None = None,
    overrides: tuple[Override, ...] = (),
    **fields: Any,
) -> Decision:
    """Return a decision with this score, whatever its dimensions would give."""
    defaults: dict[str, Any] = {
        "trace_id": trace_id,
        "domain": domain,
        "outcome": Bounds(threshold, "default", review).outcome(score),
        "score": score,
        "threshold": threshold,
        "threshold_source": "default",
        "review": review,
        "dimensions": MIDDLING.model_copy(update={"novelty": novelty}),
        "profile": "default",
        "weights": PROFILES["default"],
        "composite": score,
        "overrides": tuple(FiredOverride(name=name, score=score) for name in overrides),
        "novelty": Novelty(
            source="embedding",
            nearest=Nearest(trace_id=nearest[0], similarity=nearest[1]) if nearest else None,
            duplicate_of=duplicate_of,
        ),
        "timings": Timings(look_up_ms=0.1, embed_ms=20.0, place_ms=1.5, batch_size=1),
        "decided_at": "2026-01-01T00:00:00.000+00:00",
    }
    return Decision(**defaults | fields)


def decisions(least: int = 1) -> st.SearchStrategy[list[Decision]]:
    """Return a strategy for decisions in all kinds of domains, which may repeat each other or traces that are unknown."""
    ids = st.integers(0, 30).map("kp:trace:{}".format)
    each = st.builds(
        decision,
        ids,
        score=st.floats(0, 1),
        threshold=st.sampled_from([0.5, 0.75]),
        review=st.sampled_from([None, 0.25]),
        domain=st.sampled_from(BUILT_IN_DOMAINS) | st.text(max_size=3),
        novelty=st.floats(0, 1),
        nearest=st.none() | st.tuples(ids, st.floats(0.9, 1)),
        duplicate_of=st.none() | ids,
    )
    return st.lists(each, min_size=least, max_size=40, unique_by=lambda built: built.trace_id)


def candidate(trace_id: str, seed: int, dimensions: int = 8) -> Candidate:
    """Return a candidate whose digest and unit vector follow from the seed."""
    vector = np.random.default_rng(seed).normal(size=dimensions).astype(np.float32)
    vector /= np.linalg.norm(vector)
    return Candidate(trace_id, hashlib.blake2b(str(seed).encode(), digest_size=16).digest(), vector)


def load_embedder(recipe: RecipeName = "trace", **settings: Any) -> Embedder:
    """Load the embedder that settings choose: ``load_embedder(embedder="words")``."""
    selected = select_embedder(EmbeddingSettings(**settings), recipe)
    assert selected
    return selected


def first_queues(settings: Settings) -> SubmissionQueues:
    """Return the first queue of traces that the settings name, with the queues beside it."""
    return submission_queues(settings.broker, settings.queues)[settings.queues.first]
