"""Runs the checks of traces in a separate process, and limits the outcomes that they may demand."""

from typing import Final

from pydantic import ValidationError

from kp_scorer.bounded import BoundedProcess, Bounds
from kp_scorer.decision import CheckFailure, CheckResult, Demand, Findings
from kp_scorer.errors import ScorerError
from kp_scorer.logs import library_logger
from kp_scorer.settings.sections import ChecksSettings
from kp_scorer.trace import ReasoningTrace

_MEMORY_BYTES: Final = 2_147_483_648

log = library_logger(__name__)


class Checks:
    """Runs checks one after another. Only one thread may use it."""

    def __init__(self, settings: ChecksSettings) -> None:
        """Load the checks; raise SettingsError if one is not installed, or cannot be loaded."""
        self._settings = settings
        bounds = Bounds(settings.start_s, settings.timeout_s, _MEMORY_BYTES)
        self._process = BoundedProcess("kp_scorer.checks.answering", settings.names, bounds)

    def run(self, trace: ReasoningTrace) -> tuple[CheckResult, ...]:
        """Return the results of the checks that apply to the trace's privacy level. A failure is a result, and is logged."""
        content = trace.model_dump_json(exclude_none=True).encode()
        allowed = self._settings.allowed(trace.metadata.privacy_level)
        return tuple(self._run(name, strictest, content) for name, strictest in allowed.items())

    def close(self) -> None:
        """End the process of the checks."""
        self._process.close()

    def _run(self, name: str, strictest: Demand | None, content: bytes) -> CheckResult:
        try:
            findings = Findings.model_validate(self._process.ask(name.encode() + b" " + content))
            demands = {findings.outcome, strictest}
            outcome = None if None in demands else "review" if "review" in demands else "rejected"
            return CheckResult(**dict(findings) | {"name": name, "version": self._process.greeting[name], "outcome": outcome})
        except (OSError, ScorerError, ValidationError) as error:
            failure: CheckFailure = "timeout" if isinstance(error, TimeoutError) else "error"
            # Leave out the messages of other errors, because they may quote the trace.
            detail = str(error) if isinstance(error, ScorerError) else type(error).__name__
        log.warning("check_failed", check=name, failure=failure, detail=detail)
        demanded: Demand | None = "review" if strictest else None
        return CheckResult(name=name, version=self._process.greeting[name], failure=failure, outcome=demanded)
