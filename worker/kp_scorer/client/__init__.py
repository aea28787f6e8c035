"""The Python client: submits traces, and waits for or looks up their decisions; for threads and for asyncio."""

from kp_scorer.client.clients import AsyncClient, Client, Status, Submitted, Trace
from kp_scorer.client.decisions import read_decisions

__all__ = ["AsyncClient", "Client", "Status", "Submitted", "Trace", "read_decisions"]
