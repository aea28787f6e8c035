// An agent built with the Vercel AI SDK, which records its own spans.
import { openai } from "@ai-sdk/openai";
import { OpenTelemetry } from "@ai-sdk/otel";
import { NodeSDK } from "@opentelemetry/sdk-node";
import { generateText, isStepCount, registerTelemetry, tool } from "ai";
import { z } from "zod";

const telemetry = new NodeSDK();
telemetry.start();
registerTelemetry(new OpenTelemetry());

const tideTable = tool({
  description: "Say when high water is at a port today.",
  inputSchema: z.object({ port: z.string() }),
  execute: async ({ port }) => `High water at ${port}: 04:12 and 16:40`,
});
const { text } = await generateText({
  model: openai("gpt-5-mini"),
  tools: { tide_table: tideTable },
  stopWhen: isStepCount(5),
  prompt: "When is high water at Esbjerg today?",
});
console.log(text);
await telemetry.shutdown();
