"""OpenTelemetry spans of agents, in the protocol's JSON: of the GenAI semantic conventions, and of OpenInference.

A source is an export (``resourceSpans``), or a line of what the Collector's file exporter writes. All spans of one trace id,
wherever they stand in the input, are one run.

Specifications: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding for the form;
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ and
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-input-messages.json for ``gen_ai.*``;
https://arize-ai.github.io/openinference/spec/semantic_conventions.html for OpenInference. A span that failed has the status
that https://opentelemetry.io/docs/specs/otel/trace/api/#set-status describes: if it is the only root, the run did not
succeed. A status of Ok says less, as many set it wherever nothing was raised.
"""

from collections.abc import Iterable, Iterator, Sequence

from kp_scorer.adapters import genai, openinference
from kp_scorer.adapters.building import Run, moment, trace_id
from kp_scorer.adapters.otlp import attributes_of, ended, is_failed, nanoseconds, spans_in
from kp_scorer.adapters.source import Node
from kp_scorer.adapters.timeline import Span, in_order
from kp_scorer.errors import NotConverted


def runs(sources: Iterable[Node]) -> Iterator[Run | NotConverted]:
    """One run for each trace id, in the order in which they first appear; before them, what belongs to none."""
    traces: dict[str, list[Node]] = {}
    for source in sources:
        try:
            spans = list(spans_in(source))
        except NotConverted as error:
            yield error
            continue
        for span in spans:
            try:
                traces.setdefault(span.at("traceId").required_text().lower(), []).append(span)
            except NotConverted as error:
                yield error
    for own, nodes in traces.items():
        try:
            yield _run(own, nodes)
        except NotConverted as error:
            yield error


def _run(own: str, nodes: Sequence[Node]) -> Run:
    spans = [_span(node) for node in nodes]
    first = min(spans, key=lambda span: span.started)
    roots = [span for span in spans if not span.parent_id]
    return Run(
        first.node,
        trace_id("otel", own, [node.value for node in nodes]),
        in_order(spans),
        created_at=moment(first.node, first.started // 1_000),
        # Of several, none stands for the whole.
        success=False if len(roots) == 1 and is_failed(roots[0].node) else None,
    )


def _span(node: Node) -> Span:
    attributes = attributes_of(node)
    convention = genai if genai.is_told(attributes) else openinference
    return Span(
        node,
        span_id=node.at("spanId").text(),
        parent_id=node.at("parentSpanId").text(),
        started=nanoseconds(node.at("startTimeUnixNano")),
        ended=ended(node),
        told=convention.told(node, attributes),
    )
