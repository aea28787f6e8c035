"""The Python client: submit traces, wait for or look up their decisions; for threads and for asyncio."""

from kp_scorer.client.asynchronous import AsyncClient
from kp_scorer.client.base import Submitted
from kp_scorer.client.blocking import Client
from kp_scorer.client.settling import Status

__all__ = ["AsyncClient", "Client", "Status", "Submitted"]
