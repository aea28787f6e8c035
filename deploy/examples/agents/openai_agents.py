# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "openai-agents==0.24.0",
#     "openinference-instrumentation-openai-agents==2.6.0",
#     "opentelemetry-distro==0.66b2",
#     "opentelemetry-exporter-otlp-proto-http==1.45.2",
# ]
# ///
"""An agent built with the OpenAI Agents SDK. OpenInference records its spans."""

from agents import Agent, Runner, function_tool
from opentelemetry.instrumentation.auto_instrumentation import initialize

initialize()


@function_tool
def tide_table(port: str) -> str:
    """Say when high water is at a port today."""
    return f"High water at {port}: 04:12 and 16:40"


agent = Agent(name="Tides", model="gpt-5-mini", tools=[tide_table])
print(Runner.run_sync(agent, "When is high water at Esbjerg today?").final_output)
