"""Late outcomes by a producer that has access only to the queue, and that knows the secret behind the trace's id."""

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any


def id_known_by(secret: str) -> str:
    """Return a trace id for which anyone who knows this secret may speak."""
    return f"kp:trace:{hashlib.sha256(secret.encode()).hexdigest()}"


def late_outcome(secret: str, outcome_id: str = "kp:outcome:1", **fields: Any) -> bytes:
    payload = {"@type": "LateOutcome", "id": outcome_id, "trace_id": id_known_by(secret), "success": False, "key": secret}
    return json.dumps(payload | fields).encode()


class LateOutcomes:
    """Late outcomes of some traces of a load, whose ids it replaces. Some come before their traces, and each comes twice."""

    def __init__(self, load: Sequence[dict[str, Any]], count: int, chance: random.Random) -> None:
        self.trace_ids: dict[str, str] = {}
        """The id of the trace of each outcome."""
        self._messages: list[tuple[int, bytes]] = []
        for number, place in enumerate(chance.sample(range(len(load)), count)):
            secret, outcome_id = f"secret-of-trace-{number}", f"kp:outcome:{number}"
            load[place]["id"] = self.trace_ids[outcome_id] = id_known_by(secret)
            message = late_outcome(secret, outcome_id, success=number % 2 == 0)
            self._messages += [(place + chance.randint(-len(load) // 8, len(load) // 4), message) for _ in range(2)]
        self._messages.sort(reverse=True)

    def due(self, place: int) -> list[bytes]:
        """Return the messages that come before this position of the load, each only once."""
        due: list[bytes] = []
        while self._messages and self._messages[-1][0] < place:
            due.append(self._messages.pop()[1])
        return due
