"""Hands decisions on to another program, each at least once: by a webhook, to Langfuse, or by OpenTelemetry's protocol."""

import base64
import binascii
import hmac
import json
import re
import time
from collections.abc import Mapping
from datetime import datetime
from http.client import HTTPException
from itertools import count
from threading import Event
from typing import Any, Final, Literal
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import HTTPRedirectHandler, Request, build_opener
from uuid import NAMESPACE_URL, uuid5

import structlog

from kp_scorer.decision import Decision
from kp_scorer.errors import SettingsError
from kp_scorer.store import Store

Receiver = Literal["webhook", "langfuse", "otlp"]

NAME: Final = "kp-scorer"
_ADDRESSES: Final = {"langfuse": "LANGFUSE_HOST", "otlp": "OTEL_EXPORTER_OTLP_ENDPOINT"}
_SECRETS: Final[dict[Receiver, tuple[str, ...]]] = {
    "webhook": ("WEBHOOK_SECRET",),
    "langfuse": ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"),
    "otlp": (),
}
_URL: Final = re.compile(r"https?://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[!-~]*)?")
_OTEL_TRACE: Final = re.compile("[0-9a-f]{32}")
_TIMEOUT_S: Final = 20.0
_LONGEST_PAUSE_S: Final = 60.0
_ATTEMPTS: Final = 8
_LATER: Final = (0, 408, 425, 429, 502, 503, 504)
"""Answers of a receiver that is away or busy, 0 for none: it is asked until it is back, as decisions wait in their queue."""
_OF_SETTINGS: Final = (*range(300, 400), 401, 403, 404, 405)

log = structlog.get_logger("kp_scorer.client.forwarding")


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        # Otherwise the secrets would go there too.
        return


class Forwarder:
    """Posts decisions to one receiver, one after another, so that a later decision on a trace comes later."""

    def __init__(self, receiver: Receiver, url: str, variables: Mapping[str, str], store: Store) -> None:
        """Read secrets in environment ``variables``; an empty ``url`` is read there too, except for a webhook.

        Raises SettingsError if one is missing.
        """
        self._make = {"webhook": self._as_webhook, "langfuse": self._as_score, "otlp": self._as_event}[receiver]
        self._variables, self._store, self._opener = variables, store, build_opener(_NoRedirects)
        self._url = (url or variables.get(_ADDRESSES.get(receiver, ""), "")).rstrip("/")
        if not _URL.fullmatch(self._url):
            raise SettingsError("--url: expected http://HOST or https://HOST, without a user")
        if missing := [name for name in _SECRETS[receiver] if not variables.get(name)]:
            raise SettingsError(f"forward: expected the variable {' and '.join(missing)}")

    def forward(self, decision: Decision, stopping: Event) -> str | None:
        """Post a decision until the receiver has it; return why it refuses this one for good, empty if it does not.

        None if ``stopping`` was set before. Raises SettingsError if the receiver refuses all: by its address or the secrets.
        """
        for attempt in count(1):
            if stopping.is_set():
                return None
            status, pause_s = self._post(*self._make(decision))
            if 200 <= status < 300:
                return ""
            if status in _OF_SETTINGS:
                raise SettingsError(f"forward: the receiver answers with status {status}: correct --url or the secrets")
            if status not in _LATER and (status < 500 or attempt >= _ATTEMPTS):
                return f"status {status}"
            if attempt == 1:
                log.warning("forwarding_waits", status=status or None, trace_id=decision.trace_id)
            stopping.wait(min(max(pause_s, 2.0 ** min(attempt - 1, 6) / 4), _LONGEST_PAUSE_S))
        return None

    def _post(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, float]:
        """Post JSON; return the status, 0 without an answer, and the seconds that the receiver wants to be left alone."""
        request = Request(f"{self._url}{path}", body, {"Content-Type": "application/json", **headers})  # noqa: S310 - checked
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                return response.status, 0.0
        except HTTPError as error:
            wanted = error.headers.get("Retry-After", "")
            error.close()
            return error.code, float(wanted[:4]) if wanted.isdecimal() and wanted.isascii() else 0.0
        except (OSError, HTTPException):
            return 0, 0.0
        except ValueError:
            # The error quotes the header, which is a secret.
            raise SettingsError("forward: a variable makes a header that HTTP does not allow") from None

    def _as_webhook(self, decision: Decision) -> tuple[str, bytes, dict[str, str]]:
        """Sign the decision as Standard Webhooks do."""
        body = decision.model_dump_json().encode()
        head = f"{uuid5(NAMESPACE_URL, f'{decision.trace_id} {decision.mark}')}.{int(time.time())}"
        secret = self._variables["WEBHOOK_SECRET"]
        try:
            key = base64.b64decode(secret.removeprefix("whsec_")) if secret.startswith("whsec_") else secret.encode()
        except binascii.Error:
            raise SettingsError("WEBHOOK_SECRET: expected base64 after whsec_") from None
        signature = base64.b64encode(hmac.digest(key, f"{head}.".encode() + body, "sha256")).decode()
        names = "webhook-id", "webhook-timestamp", "webhook-signature"
        return "", body, dict(zip(names, (*head.split("."), f"v1,{signature}"), strict=True))

    def _as_score(self, decision: Decision) -> tuple[str, bytes, dict[str, str]]:
        """Make a score of Langfuse, which replaces an earlier one on the trace, as it has the same id."""
        pair = ":".join(self._variables[name] for name in _SECRETS["langfuse"])
        score = {
            "id": str(uuid5(NAMESPACE_URL, decision.trace_id)),
            "traceId": _own_id(decision),
            "name": NAME,
            "value": decision.score,
            "dataType": "NUMERIC",
            "comment": decision.outcome,
        }
        authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
        return "/api/public/scores", json.dumps(score).encode(), {"Authorization": authorization}

    def _as_event(self, decision: Decision) -> tuple[str, bytes, dict[str, str]]:
        """Make an event of the conventions for generative AI, under the agent's span if `serve` had it."""
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
        pairs = self._variables.get("OTEL_EXPORTER_OTLP_HEADERS", "")
        headers = {
            name.strip(): unquote(value.strip()) for name, _, value in (pair.partition("=") for pair in pairs.split(","))
        }
        return "/v1/logs", json.dumps(logs).encode(), {name: value for name, value in headers.items() if name}


def _own_id(decision: Decision) -> str:
    """Return the id that the run had where it came from."""
    return unquote(decision.trace_id.rpartition(":")[2])
