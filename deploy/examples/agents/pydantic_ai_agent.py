# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "pydantic-ai-slim[openai]==2.68.0",
#     "opentelemetry-distro==0.66b2",
#     "opentelemetry-exporter-otlp-proto-http==1.45.2",
# ]
# ///
"""An agent built with Pydantic AI, which records its own spans."""

from opentelemetry.instrumentation.auto_instrumentation import initialize
from pydantic_ai import Agent

initialize()
Agent.instrument_all()
agent = Agent("openai:gpt-5-mini")


@agent.tool_plain
def tide_table(port: str) -> str:
    """Say when high water is at a port today."""
    return f"High water at {port}: 04:12 and 16:40"


print(agent.run_sync("When is high water at Esbjerg today?").output)
