"""Traces, and the JSON they come from, in one line each."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from hypothesis import strategies as st
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.scoring import Policy
from kp_scorer.store import MemoryLedger
from kp_scorer.trace import STEP_TYPES, ReasoningTrace

LIMITS: Final = Limits()
BUILT_IN_DOMAINS: Final = ("finance", "code", "medical", "customer_service")

Payload = dict[str, Any]


def step(kind: str, tool: str | None = None, content: str | None = None, **fields: Any) -> Payload:
    """One step as JSON; ``step_id`` is 0 unless given."""
    found: Payload = {"step_id": 0, "type": kind, **fields}
    if content is not None:
        found["content"] = content
    if tool is not None:
        found["tool"] = {"name": tool}
    return found


def steps(*types: str) -> list[Payload]:
    """One step of each type, without a tool."""
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
    """A trace as JSON with nothing that may be left out."""
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
    """A trace as JSON with every field there is."""
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


def make_trace(**overrides: Any) -> ReasoningTrace:
    """A small valid trace; ``overrides`` are those of :func:`minimal_payload`."""
    return decode_trace(minimal_payload(**overrides), LIMITS)


def decided(trace: ReasoningTrace, policy: Policy | None = None) -> Decision:
    """The decision on a trace without an embedder, by the default policy unless another is given."""
    (found,) = Decider(MemoryLedger(), policy or Policy(), None, max_attempts=5).decide([trace])
    assert isinstance(found, Decision)
    return found


@cache
def decision_on(trace_id: str) -> bytes:
    """A decision as the ledger keeps it, on a small trace of this id."""
    return decided(make_trace(trace_id=trace_id)).model_dump_json().encode()


def keys_of(path: str) -> list[str | int]:
    """The keys of a dotted path: names, and numbers for places in a list."""
    return [int(key) if key.isdigit() else key for key in path.split(".")]


def changed(payload: Payload, path: str, value: object) -> Payload:
    """A copy of ``payload`` with another value at a dotted path."""
    copied, *outer, last = copy.deepcopy(payload), *keys_of(path)
    _holder(copied, outer)[last] = value
    return copied


def without(payload: Payload, path: str) -> Payload:
    """A copy of ``payload`` with nothing at a dotted path."""
    copied, *outer, last = copy.deepcopy(payload), *keys_of(path)
    del _holder(copied, outer)[last]
    return copied


def _holder(payload: Payload, outer: Sequence[Any]) -> Any:
    holder: Any = payload
    for key in outer:
        holder = holder[key]
    return holder


def traces() -> st.SearchStrategy[ReasoningTrace]:
    """Traces of every profile and of others, with all kinds of steps and tools."""
    tools = st.none() | st.sampled_from(["sql", "search", "mail", "Sql", ""])
    one_step = st.builds(step, st.sampled_from(STEP_TYPES), tools, st.none() | st.text("ab ", max_size=5))
    return st.builds(
        make_trace,
        domain=st.sampled_from([*BUILT_IN_DOMAINS, "default", "travel"]),
        success=st.booleans(),
        confidence=st.floats(0, 1),
        steps=st.lists(one_step, min_size=1, max_size=30),
    )
