"""KnowledgePulse scorer: score AI-agent reasoning traces and route the decisions.

    from kp_scorer import Client

    with Client.connect("redis://queue:6379/0") as client:
        trace_id = client.submit(trace)               # returns at once
        decision = client.wait(trace_id, timeout_s=30)

    from kp_scorer import AsyncClient                 # the same for asyncio: await client.submit(trace)

    from kp_scorer import read_decisions

    for decision in read_decisions("accepted"):       # as they arrive; the loop acknowledges each
        print(decision.trace_id)

    from kp_scorer import score_traces

    for decision in score_traces(traces):             # in this process, without Redis
        print(decision.outcome, decision.score)

    from kp_scorer import NotConverted, Scorer, calibrate, convert, explain, re_decide

    scorer = Scorer()                                 # the same, trace by trace
    traces = convert(chats, domain="code", confidence=0.8, success=True)
    decisions = [scorer.score(trace) for trace in traces if not isinstance(trace, NotConverted)]
    print(scorer.how_new("a task"), explain(decisions[0]))
    again = re_decide(decisions, calibrate(decisions, accept=0.2))

    from kp_scorer import KeptRuns, as_prompt

    context = as_prompt(KeptRuns("kept.jsonl").similar("a task"))  # the runs of the most similar tasks

    from kp_scorer import rows, stored_decisions, stored_labels

    table = pandas.DataFrame(rows(stored_decisions()))  # or polars.DataFrame; a row for each stored decision
    good = calibrate(list(stored_decisions()), precision=0.9, good=stored_labels())

The names in this module are the public API; everything else may change from one version to the next. Importing the package is
cheap: Celery, the Redis client and the embedding engines are imported when a name that needs them is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kp_scorer.client import AsyncClient, Client, Status, Submitted, Trace, read_decisions
    from kp_scorer.decision import Decision, Findings
    from kp_scorer.errors import (
        DecisionTimeout,
        InvalidTrace,
        NotConverted,
        Problem,
        Reason,
        ScorerError,
        ServiceUnavailable,
        SettingsError,
        TraceConflict,
        TraceDead,
    )
    from kp_scorer.kept import KeptRuns, SimilarRun, as_prompt
    from kp_scorer.novelty.vector_cache import VectorCache
    from kp_scorer.offline import Scorer, convert, score_traces
    from kp_scorer.report.calibration import calibrate, re_decide
    from kp_scorer.report.explanation import explain
    from kp_scorer.report.rows import Row, rows
    from kp_scorer.settings import Settings, load_settings
    from kp_scorer.store.store import stored_decisions, stored_labels
    from kp_scorer.trace import ReasoningTrace

# fmt: off
__all__ = [
    "AsyncClient", "Client", "Decision", "DecisionTimeout", "Findings", "InvalidTrace", "KeptRuns", "NotConverted",
    "Problem", "Reason", "ReasoningTrace", "Row", "Scorer", "ScorerError", "ServiceUnavailable", "Settings",
    "SettingsError", "SimilarRun", "Status", "Submitted", "Trace", "TraceConflict", "TraceDead", "VectorCache", "as_prompt",
    "calibrate", "convert", "explain", "load_settings", "re_decide", "read_decisions", "rows", "score_traces",
    "stored_decisions", "stored_labels",
]
# fmt: on

_MODULES: Final = {  # Public names by the module that defines them; ``errors`` defines all others.
    "report.rows": {"Row", "rows"},
    "client": {"AsyncClient", "Client", "Status", "Submitted", "Trace", "read_decisions"},
    "decision": {"Decision", "Findings"},
    "kept": {"KeptRuns", "SimilarRun", "as_prompt"},
    "novelty.vector_cache": {"VectorCache"},
    "offline": {"Scorer", "convert", "score_traces"},
    "report.explanation": {"explain"},
    "report.calibration": {"calibrate", "re_decide"},
    "settings": {"Settings", "load_settings"},
    "store.store": {"stored_decisions", "stored_labels"},
    "trace": {"ReasoningTrace"},
}


def __getattr__(name: str) -> Any:
    """Import the object of this name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "errors")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
