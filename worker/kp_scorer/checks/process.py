"""The process of the checks, ``python -m kp_scorer.checks.process CHANNEL START_S TIMEOUT_S NAME…``: it knows no passwords."""

import json
import os
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Final

from pydantic import ValidationError

from kp_scorer.decision import CheckResult, Findings
from kp_scorer.errors import SettingsError
from kp_scorer.trace import ReasoningTrace

_MEMORY_BYTES: Final = 2_147_483_648
_SPARE_S: Final = 1.0


def main() -> None:
    """Load the checks, then run one for each line from the channel, until its other end is closed."""
    channel, start_s, timeout_s, *names = sys.argv[1:]
    own_pid = os.getpid()
    _end_in(float(start_s))
    # Only the soft limit: a check that needs more may raise it.
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    os.set_inheritable(int(channel), False)
    with socket.socket(fileno=int(channel)) as connection, connection.makefile("rwb") as stream:
        checks, answer = _load(names)
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0)
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()
            number, _, question = stream.readline().partition(b" ")
            if not question:
                # Threads that a check started do not keep it.
                os._exit(0)
            name, _, content = question.partition(b" ")
            _end_in(float(timeout_s))
            answer = _answer(checks[name.decode()], content) | {"number": int(number)}
            if os.getpid() != own_pid:
                # The check forked, and its child returned.
                os._exit(1)


def _end_in(seconds: float) -> None:
    # Who kills the worker leaves nobody to end a check that does not end. This signal needs no Python for it.
    signal.setitimer(signal.ITIMER_REAL, seconds + _SPARE_S)


def _load(names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checks by name, and what to answer: their versions, or why one cannot be loaded."""
    checks, versions = {}, {}
    for name in names:
        try:
            entries = entry_points(group="kp_scorer.checks", name=name)
            if len(entries) != 1:
                have = sorted(entry.name for entry in entry_points(group="kp_scorer.checks"))
                raise SettingsError(f"{name}: expected an entry point of one package, got {len(entries)}; there are {have}")
            (entry,) = entries
            checks[name] = check = entry.load()
            version = getattr(check, "version", None) or (entry.dist.version if entry.dist else "none")
            versions[name] = CheckResult(name=name, version=version).version
        except ValidationError:
            return {}, {"problem": f"{name}: version: expected a text of 1 to 64 characters of ASCII without spaces"}
        except SettingsError as error:
            return {}, {"problem": str(error)}
        except BaseException as error:
            return {}, {"problem": f"{name} cannot be loaded: {type(error).__name__}: {error}"}
    return checks, {"versions": versions}


def _answer(check: Any, content: bytes) -> dict[str, Any]:
    try:
        return {"findings": Findings.model_validate(check(_trace(content))).model_dump()}
    except ValidationError as error:
        # Only the field, as values and names within may be text of the trace.
        fields = {str(each["loc"][0]) for each in error.errors(include_input=False) if each["loc"]}
        return {"error": f"it made no valid {error.title}: {', '.join(sorted(fields & Findings.model_fields.keys()))}"}
    except MemoryError:
        os._exit(1)
    except BaseException as error:
        # Its message may quote the trace.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}, raised by {frame.name} in {frame.filename}:{frame.lineno}"}


@lru_cache(maxsize=1)
def _trace(content: bytes) -> ReasoningTrace:
    return ReasoningTrace.model_validate(json.loads(content))


if __name__ == "__main__":
    main()
