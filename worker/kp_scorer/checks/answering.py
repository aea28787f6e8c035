"""Runs the checks in their own process: loads them once, then runs one for each question."""

from collections.abc import Sequence
from functools import lru_cache, partial
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from kp_scorer.bounded import Answers
from kp_scorer.decision import CheckResult, Findings
from kp_scorer.errors import ProcessFailed, SettingsError
from kp_scorer.trace import ReasoningTrace


def load(names: Sequence[str]) -> tuple[dict[str, str], Answers]:
    """Load checks; return their versions, and the function that runs one by its name on a trace.

    Raises SettingsError if loading fails.
    """
    checks, versions = {}, {}
    for name in names:
        entries = entry_points(group="kp_scorer.checks", name=name)
        if len(entries) != 1:
            have = sorted(entry.name for entry in entry_points(group="kp_scorer.checks"))
            raise SettingsError(f"checks: {name}: expected one entry point of this name, got {len(entries)}; there are {have}")
        (entry,) = entries
        try:
            checks[name] = check = entry.load()
            version = getattr(check, "version", None) or (entry.dist.version if entry.dist else "none")
            versions[name] = CheckResult(name=name, version=version).version
        except ValidationError:
            expected = "a text of 1 to 64 characters of ASCII without spaces"
            raise SettingsError(f"checks: {name}: version: expected {expected}") from None
        except SettingsError as error:
            raise SettingsError(f"checks: {error}") from None
        except BaseException as error:
            raise SettingsError(f"checks: {name} cannot be loaded: {type(error).__name__}: {error}") from None
    return versions, partial(_findings, checks)


def _findings(checks: dict[str, Any], question: bytes) -> dict[str, Any]:
    name, _, content = question.partition(b" ")
    try:
        return Findings.model_validate(checks[name.decode()](_trace(content))).model_dump()
    except ValidationError as error:
        # Name only the fields, because their values, and the names in these, may be text of the trace.
        fields = {str(each["loc"][0]) for each in error.errors(include_input=False) if each["loc"]}
        raise ProcessFailed(
            f"it returned no valid {error.title}: {', '.join(sorted(fields & Findings.model_fields.keys()))}"
        ) from None


@lru_cache(maxsize=1)
def _trace(content: bytes) -> ReasoningTrace:
    return ReasoningTrace.model_validate_json(content)
