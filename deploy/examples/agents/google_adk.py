# /// script
# requires-python = ">=3.11"
# dependencies = [
#     # google-adk needs OpenTelemetry below 1.45. Without a pin, a newer exporter would bring google-adk 1.14.
#     "google-adk==2.13.0",
#     "opentelemetry-exporter-otlp-proto-http==1.44.0",
# ]
# ///
"""An agent built with Google's Agent Development Kit, which records its own spans."""

import asyncio

from google.adk.agents import Agent
from google.adk.runners import InMemoryRunner
from google.adk.telemetry.setup import maybe_set_otel_providers

maybe_set_otel_providers()


def tide_table(port: str) -> str:
    """Say when high water is at a port today."""
    return f"High water at {port}: 04:12 and 16:40"


agent = Agent(name="tides", model="gemini-3-flash", tools=[tide_table])
asyncio.run(InMemoryRunner(agent).run_debug("When is high water at Esbjerg today?"))
