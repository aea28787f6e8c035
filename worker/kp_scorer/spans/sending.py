"""Spans of what a producer sends, for the application that our client runs in, if it records any."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kp_scorer.spans.context import NO_CONTEXT, Context
from kp_scorer.spans.recorder import Destination


@contextmanager
def sending(trace_ids: Sequence[str], destination: Destination) -> Iterator[Sequence[Context]]:
    """Record the sending of each of these traces, while this lasts; give what goes into the headers of each."""
    # Whoever records spans has imported this long ago; of the others, most have not even installed it.
    if "opentelemetry.trace" not in sys.modules:
        yield [NO_CONTEXT] * len(trace_ids)
        return
    from kp_scorer.spans.recording import sending_spans

    with sending_spans(trace_ids, destination) as contexts:
        yield contexts
