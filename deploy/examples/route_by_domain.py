"""Submits traces, as JSON Lines on stdin, to the fleets of ``deploy/kubernetes/divided``: each to that of its domain.

``CODE_URL`` and ``REST_URL`` say where the Redis of each fleet is, and as which user to connect.
"""

import json
import os
import sys
from contextlib import ExitStack

from kp_scorer import Client, load_settings

# A domain must keep its fleet: each decides a trace once, and knows nothing of what another has decided.
FLEETS = {"code": "code", "security": "code"}
OTHERS = "rest"


def client_of(fleet: str) -> Client:
    """A client with the names that a fleet's workers have."""
    url = os.environ[f"{fleet.upper()}_URL"]
    names = {"redis.prefix": f"{fleet}.kp", "queues.traces": f"{fleet}.traces"}
    return Client(load_settings({"broker.url": url, "redis.url": url, **names}))


def main() -> None:
    """Submit all traces, and print the fleet and the id of each."""
    with ExitStack() as stack:
        clients = {fleet: stack.enter_context(client_of(fleet)) for fleet in {*FLEETS.values(), OTHERS}}
        for line in sys.stdin:
            trace = json.loads(line)
            fleet = FLEETS.get(trace["metadata"]["task_domain"], OTHERS)
            sys.stdout.write(f"{fleet} {clients[fleet].submit(trace)}\n")


if __name__ == "__main__":
    main()
