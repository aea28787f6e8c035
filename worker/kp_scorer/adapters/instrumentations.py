"""Identifies the instrumentation that wrote a span: its framework, and the setting that makes it record messages."""

import re
from collections.abc import Iterable
from typing import Final

from kp_scorer.adapters.attributes import SERVICE, attributes_of
from kp_scorer.adapters.node import Node
from kp_scorer.adapters.span import Span

_FRAMEWORKS: Final = {
    "gcp.vertex.agent": "google-adk",
    "ai": "ai-sdk",
    "gen_ai": "ai-sdk",
    "agent_framework": "agent-framework",
}
_SCOPE: Final = re.compile(r"(?:.*\binstrumentation\.|logfire\.|ai\.|@)?([\w -]+?)(?:_v\d+|-sdk)?(?:[./].*)?")
_SWITCHES: Final = {  # The setting that makes an instrumentation record messages, by the beginning of its name.
    "openinference": "OPENINFERENCE_HIDE_INPUTS=false and OPENINFERENCE_HIDE_OUTPUTS=false",
    "semantic_kernel": "SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS_SENSITIVE=true",
    "agent_framework": "ENABLE_SENSITIVE_DATA=true",
    "pydantic-ai": "include_content in InstrumentationSettings",
    "": "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY (older versions: true), or the switch of the framework",
}


def framework_of(spans: Iterable[Span]) -> str | None:
    """Return the name of the framework that recorded the run's first span of an agent, or else of a model, a tool or anything.

    Return None if no span names its scope.
    """
    ranks = {"agent": 0, "model": 1, "tool": 2}
    named = [span for span in spans if _scope(span.node)]
    span = min(named, key=lambda span: (ranks.get(span.kind, len(ranks)), span.started_ns), default=None)
    name = _SCOPE.fullmatch(_scope(span.node)) if span else None
    return _FRAMEWORKS.get(name[0], name[1]) if name else None


def _scope(span: Node) -> str:
    name = span.at("scope", "name").value if isinstance(span.at("scope").value, dict) else None
    return name if isinstance(name, str) else ""


def remedy_for(span: Node) -> str:
    """Return the error text for a span without messages: the setting that makes its instrumentation record them."""
    # Look in the span, too: `serve` stores some attributes of the resource there.
    holders = (holder for holder in (span, span.at("resource")) if holder.value)
    service = next(filter(None, (attributes_of(holder).value.get(SERVICE) for holder in holders)), "a service without a name")
    switch = next(variable for prefix, variable in _SWITCHES.items() if _scope(span).startswith(prefix))
    return f"expected messages, which {_scope(span) or 'the instrumentation'} in {service} does not record: set {switch}"
