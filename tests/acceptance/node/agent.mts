import { OTLPTraceExporter } from "@opentelemetry/exporter-trace-otlp-proto";
import { resourceFromAttributes } from "@opentelemetry/resources";
import { BasicTracerProvider, BatchSpanProcessor } from "@opentelemetry/sdk-trace-base";

const server = process.env.KP_SERVER ?? "http://127.0.0.1:4318";
const headers: Record<string, string> = process.env.KP_TOKEN ? { Authorization: `Bearer ${process.env.KP_TOKEN}` } : {};
const exporter = new OTLPTraceExporter({ url: `${server}/v1/traces`, headers });
const provider = new BasicTracerProvider({
  resource: resourceFromAttributes({ "service.name": "tide-agent", "kp.domain": "code", "kp.confidence": 0.8 }),
  spanProcessors: [new BatchSpanProcessor(exporter)],
});
const text = (role: string, content: string) => JSON.stringify([{ role, parts: [{ type: "text", content }] }]);
const chat = provider.getTracer("agent").startSpan("chat", {
  attributes: { "gen_ai.operation.name": "chat", "gen_ai.input.messages": text("user", "When is high water?") },
});
chat.setAttributes({ "gen_ai.output.messages": text("assistant", "At 04:12."), "kp.success": true });
chat.end();
await provider.shutdown();
let status: any;
do {
  await new Promise((go) => setTimeout(go, 200));
  status = await (await fetch(`${server}/traces/kp:trace:otel:${chat.spanContext().traceId}`, { headers })).json();
} while (status.state !== "decided" && status.state !== "dead");
console.log(JSON.stringify(status));
