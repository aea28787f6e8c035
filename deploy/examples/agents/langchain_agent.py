# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "langchain==1.5.2",
#     "langchain-openai==1.7.4",
#     "openinference-instrumentation-langchain==0.1.80",
#     "opentelemetry-distro==0.66b2",
#     "opentelemetry-exporter-otlp-proto-http==1.45.2",
# ]
# ///
"""An agent built with LangChain, as a LangGraph graph. OpenInference records its spans."""

from langchain.agents import create_agent
from opentelemetry.instrumentation.auto_instrumentation import initialize

initialize()


def tide_table(port: str) -> str:
    """Say when high water is at a port today."""
    return f"High water at {port}: 04:12 and 16:40"


agent = create_agent("openai:gpt-5-mini", tools=[tide_table])
result = agent.invoke({"messages": [{"role": "user", "content": "When is high water at Esbjerg today?"}]})
print(result["messages"][-1].content)
