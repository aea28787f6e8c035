"""The Celery task, by whose name submissions are known. It never runs: the worker decides what calls it, batches at a time."""

from typing import Any

from celery import Celery

from kp_scorer.broker.task_message import TASK_NAME
from kp_scorer.process.delivery import SubmissionRequest


def register(app: Celery) -> None:
    """Add ``score_trace`` to the app."""

    @app.task(name=TASK_NAME, Request=SubmissionRequest, acks_late=True, ignore_result=True, typing=False)
    def score_trace(*_: Any, **__: Any) -> None:
        """Score one trace, given as the only argument: a JSON object.

        A producer who asks for the result gets the decision, or for a dead letter
        ``{"trace_id", "state": "dead", "reason", "detail"}``.
        """
        raise NotImplementedError("score_trace is decided by a worker: send it by name")
