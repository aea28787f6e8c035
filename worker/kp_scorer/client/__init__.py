"""The Python client: submits traces, and waits for or looks up their decisions; for threads and for asyncio."""

from kp_scorer.client.async_client import AsyncClient
from kp_scorer.client.base import Submitted, Trace
from kp_scorer.client.client import Client
from kp_scorer.client.decisions import read_decisions
from kp_scorer.client.waiting import Status

__all__ = ["AsyncClient", "Client", "Status", "Submitted", "Trace", "read_decisions"]
