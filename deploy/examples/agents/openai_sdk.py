# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "openai==3.57.0",
#     "openinference-instrumentation-openai==0.1.66",
#     "opentelemetry-distro==0.66b2",
#     "opentelemetry-exporter-otlp-proto-http==1.45.2",
# ]
# ///
"""An agent built with the OpenAI SDK alone. OpenInference records each of its calls."""

import json

from openai import OpenAI
from opentelemetry.instrumentation.auto_instrumentation import initialize

initialize()
TOOL = {
    "name": "tide_table",
    "description": "Say when high water is at a port today.",
    "parameters": {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]},
}


def tide_table(port: str) -> str:
    """Say when high water is at a port today."""
    return f"High water at {port}: 04:12 and 16:40"


def ask(messages: list):
    """Return the next message of the model."""
    tools = [{"type": "function", "function": TOOL}]
    return OpenAI().chat.completions.create(model="gpt-5-mini", messages=messages, tools=tools).choices[0].message


messages = [{"role": "user", "content": "When is high water at Esbjerg today?"}]
while (message := ask(messages)).tool_calls:
    messages.append(message)
    for call in message.tool_calls:
        content = tide_table(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
print(message.content)
