"""Hands decisions, or the spans of their runs, on to another program, each at least once."""

import base64
import hmac
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from http.client import HTTPException
from itertools import count
from threading import Event
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import HTTPRedirectHandler, Request, build_opener
from uuid import NAMESPACE_URL, uuid5

import structlog

from kp_scorer.client.timed_http import TimedHandler
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.store import Store
from kp_scorer.store.runs import RUN_PREFIX

Receiver = Literal["webhook", "langfuse", "otlp", "otlp-spans"]

NAME: Final = "kp-scorer"
_VARIABLES: Final[dict[Receiver, tuple[str, ...]]] = {
    "webhook": ("", "WEBHOOK_SECRET"),
    "langfuse": ("LANGFUSE_HOST", "LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"),
    "otlp": ("OTEL_EXPORTER_OTLP_ENDPOINT",),
    "otlp-spans": ("OTEL_EXPORTER_OTLP_ENDPOINT",),
}
"""The environment variables of each receiver: first that of the address, then those of the secrets."""
_URL: Final = re.compile(r"https?://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[!-~]*)?")
_OTEL_TRACE: Final = re.compile("[0-9a-f]{32}")
_TIMEOUT_S: Final = 20.0
_ANSWER_BYTES: Final = 65_536
"""The most bytes of an answer that are read."""
_MESSAGE_CHARACTERS: Final = 200
_LONGEST_PAUSE_S: Final = 60.0
_OUTAGE_PAUSE_S: Final = 1.0
_ATTEMPTS: Final = 8
_LATER: Final = (0, 408, 425, 429, 502, 503, 504)
"""The statuses of a receiver that is away or busy; 0 is no answer. It is asked again until it is back; decisions wait."""
_OF_SETTINGS: Final = (*range(300, 400), 401, 403, 404, 405)

_Request = tuple[str, bytes, dict[str, str]]
"""A path, a body and headers."""
_Make = Callable[[Decision], _Request | str]

T = TypeVar("T")

log = structlog.get_logger("kp_scorer.client.forwarding")


class _Answer(NamedTuple):
    status: int  # 0 if there was no answer.
    pause_s: float = 0.0  # The pause that the receiver asks for.
    body: bytes = b""
    problem: str = ""  # Why there was no answer.


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        # Otherwise the secrets would go to the new address, too.
        return


class Forwarder:
    """Posts decisions to one receiver, one after another, so that those on the same trace arrive in order."""

    def __init__(self, receiver: Receiver, url: str, variables: Mapping[str, str], store: Store, one_in: int = 0) -> None:
        """Read the secrets in environment ``variables``, and the address too if ``url`` is empty, except for a webhook.

        Of the runs that are not accepted, the spans of one in ``one_in`` are handed on, too. Raises SettingsError if a secret
        is missing.
        """
        make: Sequence[_Make] = self._as_webhook, self._as_score, self._as_event, self._as_spans
        self._make = dict(zip(get_args(Receiver), make, strict=True))[receiver]
        self._rejected: Callable[[bytes], tuple[int, str]] | None = _rejected_of_events if receiver == "otlp" else None
        self.count, self._one_in, self._is_reached = 0, one_in, False
        self._variables, self._store, self._opener = variables, store, build_opener(_NoRedirects, TimedHandler)
        address, *secrets = _VARIABLES[receiver]
        self._url = (url or variables.get(address, "")).rstrip("/")
        if not _URL.fullmatch(self._url):
            raise SettingsError("--url: expected http://HOST or https://HOST, without a user")
        if missing := [name for name in secrets if not variables.get(name)]:
            raise SettingsError(f"forward: expected the variable {' and '.join(missing)}")
        if receiver == "otlp-spans":
            try:
                from kp_scorer.client.run_export import export_of, rejected_of_spans
            except ModuleNotFoundError as error:
                raise SettingsError(f"forward: there is no {error.name}: install kp-scorer[serve]") from None
            self._export_of, self._rejected = export_of, rejected_of_spans

    def forward(self, decision: Decision, stopping: Event) -> str | None:
        """Post a decision until the receiver has it; return an empty text, or the reason if it refuses this decision for good.

        Returns None if ``stopping`` was set before. Raises SettingsError if the receiver refuses every decision, because of the
        address or the secrets.
        """
        for attempt in count(1):
            if stopping.is_set():
                return None
            request = self.through_outages(partial(self._make, decision), stopping)
            if isinstance(request, str):
                return request
            status, pause_s, body, problem = self._post(*request)
            if 200 <= status < 300:
                rejected, message = self._rejected(body) if self._rejected else (0, "")
                # OTLP forbids sending rejected items again.
                if rejected:
                    return f"rejected {rejected} of it: {message[:_MESSAGE_CHARACTERS]}"
                self.count += 1
                return ""
            if status in _OF_SETTINGS:
                raise SettingsError(f"forward: the receiver answers with status {status}: correct --url or the secrets")
            if status not in _LATER and (status < 500 or attempt >= _ATTEMPTS):
                return f"status {status}"
            if attempt == 1:
                why = {"detail": problem} if problem else {"status": status}
                log.warning("forwarding_waits", **why, trace_id=decision.trace_id)
            stopping.wait(min(max(pause_s, 2.0 ** min(attempt - 1, 6) / 4), _LONGEST_PAUSE_S))
        return None

    def through_outages(self, call: Callable[[], T], stopping: Event) -> T:
        """Call a function of the store, again and again while Redis is away.

        Raises ServiceUnavailable if no call has succeeded yet, as one that this user may not make, or once ``stopping`` is set.
        """
        while True:
            try:
                result = call()
            except ServiceUnavailable as error:
                if stopping.is_set() or not self._is_reached:
                    raise
                log.warning("forwarding_waits", detail=str(error))
                stopping.wait(_OUTAGE_PAUSE_S)
            else:
                self._is_reached = True
                return result

    def _post(self, path: str, body: bytes, headers: Mapping[str, str]) -> _Answer:
        request = Request(f"{self._url}{path}", body, {"Content-Type": "application/json", **headers})  # noqa: S310 - checked
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                return _Answer(response.status, body=response.read(_ANSWER_BYTES))
        except HTTPError as error:
            wanted = error.headers.get("Retry-After", "")
            error.close()
            return _Answer(error.code, float(wanted[:4]) if wanted.isdecimal() and wanted.isascii() else 0.0)
        except OSError as error:
            return _Answer(0, problem=str(error) or type(error).__name__)
        except HTTPException as error:
            # Its text quotes the receiver.
            return _Answer(0, problem=type(error).__name__)
        except ValueError:
            # Do not pass the error on: it quotes the header, which is a secret.
            raise SettingsError("forward: a variable makes a header that HTTP does not allow") from None

    def _as_webhook(self, decision: Decision) -> _Request:
        """Return the request of a webhook, signed as Standard Webhooks are."""
        body = decision.model_dump_json().encode()
        head = f"{uuid5(NAMESPACE_URL, f'{decision.trace_id} {decision.mark}')}.{int(time.time())}"
        secret = self._variables["WEBHOOK_SECRET"]
        try:
            key = base64.b64decode(secret.removeprefix("whsec_")) if secret.startswith("whsec_") else os.fsencode(secret)
        except ValueError:
            key = b""
        # Anybody could make the signature of an empty key.
        if not key:
            raise SettingsError("WEBHOOK_SECRET: expected base64 after whsec_")
        signature = base64.b64encode(hmac.digest(key, f"{head}.".encode() + body, "sha256")).decode()
        names = "webhook-id", "webhook-timestamp", "webhook-signature"
        return "", body, dict(zip(names, (*head.split("."), f"v1,{signature}"), strict=True))

    def _as_score(self, decision: Decision) -> _Request:
        """Return the request that scores the trace in Langfuse, and replaces its earlier score, which has the same id."""
        pair = ":".join(self._variables[name] for name in _VARIABLES["langfuse"][1:])
        score = {
            "id": str(uuid5(NAMESPACE_URL, decision.trace_id)),
            "traceId": _own_id(decision),
            "name": NAME,
            "value": decision.score,
            "dataType": "NUMERIC",
            "comment": decision.outcome,
        }
        authorization = f"Basic {base64.b64encode(os.fsencode(pair)).decode()}"
        return "/api/public/scores", json.dumps(score).encode(), {"Authorization": authorization}

    def _as_event(self, decision: Decision) -> _Request:
        """Return the request of an event by the conventions for generative AI, under the agent's span if `serve` had that."""
        attributes = {
            "gen_ai.evaluation.name": {"stringValue": NAME},
            "gen_ai.evaluation.score.value": {"doubleValue": decision.score},
            "gen_ai.evaluation.score.label": {"stringValue": decision.outcome},
            "kp_scorer.trace.id": {"stringValue": decision.trace_id},
        }
        record: dict[str, Any] = {
            "timeUnixNano": f"{datetime.fromisoformat(decision.decided_at).timestamp() * 1e9:.0f}",
            "eventName": "gen_ai.evaluation.result",
            "attributes": [{"key": key, "value": value} for key, value in attributes.items()],
        }
        if _OTEL_TRACE.fullmatch(run_id := _own_id(decision)):
            record |= {"traceId": run_id, "spanId": self._store.runs.agent_span(decision.trace_id)}
        resource = {"attributes": [{"key": "service.name", "value": {"stringValue": NAME}}]}
        logs = {"resourceLogs": [{"resource": resource, "scopeLogs": [{"scope": {"name": NAME}, "logRecords": [record]}]}]}
        return "/v1/logs", json.dumps(logs).encode(), self._otlp_headers()

    def _as_spans(self, decision: Decision) -> _Request | str:
        """Return the request that exports the spans of an accepted or sampled run.

        If there is nothing to export, return the reason, which is empty if nothing should be.
        """
        if not (weight := self._weight(decision)):
            return ""
        run = self._store.runs.ended(decision.trace_id)
        if not run or not run.spans:
            return "" if run and run.closed == "forwarded" else "serve keeps no spans of it"
        try:
            body = self._export_of(run.spans, weight)
        except ValueError:
            return "its spans are not those of OTLP"
        return "/v1/traces", body, {"Content-Type": "application/x-protobuf"} | self._otlp_headers()

    def _weight(self, decision: Decision) -> int:
        """Return how many runs this one stands for: 1 if it is accepted; 0 if it was no run of spans, or is left out."""
        run_id = _own_id(decision)
        if not (decision.trace_id.startswith(RUN_PREFIX) and _OTEL_TRACE.fullmatch(run_id)):
            return 0
        # As OpenTelemetry's samplers do, draw the ids whose last 56 bits are highest.
        is_drawn = self._one_in and int(run_id[-14:], 16) >= 2**56 - 2**56 // self._one_in
        return 1 if decision.outcome == "accepted" else self._one_in if is_drawn else 0

    def _otlp_headers(self) -> dict[str, str]:
        pairs = [pair.partition("=") for pair in self._variables.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",")]
        return {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip()}


def _rejected_of_events(answer: bytes) -> tuple[int, str]:
    """Return the number of events that a receiver of OTLP rejected though it accepted the request, and its message on them."""
    try:
        partial = json.loads(answer)["partialSuccess"]
        return int(partial["rejectedLogRecords"]), str(partial.get("errorMessage", ""))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return 0, ""


def _own_id(decision: Decision) -> str:
    """Return the id that the run had in the system from which it came."""
    return unquote(decision.trace_id.rpartition(":")[2])
