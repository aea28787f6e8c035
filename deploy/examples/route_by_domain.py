"""Submits traces, as JSON Lines on stdin, to the fleets of ``deploy/kubernetes/divided``, each to the fleet of its domain.

``CODE_URL`` and ``REST_URL`` are the URLs of the two fleets' Redis, with the user and password to connect with.
"""

import json
import os
import sys
from contextlib import ExitStack

from kp_scorer import Client, load_settings

# A domain must keep its fleet, because a fleet does not know which traces another one has decided, and would decide them again.
FLEETS = {"code": "code", "security": "code"}
OTHERS = "rest"


def client_of(fleet: str) -> Client:
    """Return a client that uses the same names of keys and queues as a fleet's workers."""
    url = os.environ[f"{fleet.upper()}_URL"]
    names = {"redis.prefix": f"{fleet}.kp", "queues.traces": f"{fleet}.traces"}
    return Client(load_settings({"broker.url": url, "redis.url": url, **names}))


def main() -> None:
    """Submit all traces, and print the fleet and the id of each trace."""
    with ExitStack() as stack:
        clients = {fleet: stack.enter_context(client_of(fleet)) for fleet in {*FLEETS.values(), OTHERS}}
        for line in sys.stdin:
            trace = json.loads(line)
            fleet = FLEETS.get(trace["metadata"]["task_domain"], OTHERS)
            sys.stdout.write(f"{fleet} {clients[fleet].submit(trace)}\n")


if __name__ == "__main__":
    main()
