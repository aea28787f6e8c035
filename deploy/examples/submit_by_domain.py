"""Submits each trace of a JSON Lines file to the fleet of its domain, as the overlay ``deploy/kubernetes/divided`` runs them.

Run it with ``python submit_by_domain.py FILE``; ``KP_BROKER_URL`` and ``KP_REDIS_URL`` say where the servers are.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

from kp_scorer import Client, load_settings

FLEETS = {"code": "code"}
"""Fleets by domain. All other domains go to the fleet without a name."""


def settings_of(fleet: str) -> dict[str, str]:
    """What makes a fleet's settings differ from those of the others."""
    queues = {f"queues.{outcome}": f"decisions.{fleet}.{outcome}" for outcome in ("accepted", "review", "rejected")}
    return {"redis.prefix": f"kp-{fleet}", "queues.traces": f"traces.{fleet}", **queues} if fleet else {}


def main() -> None:
    """Submit every trace of the file."""
    with ExitStack() as stack, Path(sys.argv[1]).open() as file:
        clients = {fleet: stack.enter_context(Client(load_settings(settings_of(fleet)))) for fleet in {"", *FLEETS.values()}}
        for line in file:
            trace = json.loads(line)
            clients[FLEETS.get(trace["metadata"]["task_domain"], "")].submit(trace)


if __name__ == "__main__":
    main()
