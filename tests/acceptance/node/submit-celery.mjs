import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import celery from "celery-node";

const broker = process.env.KP_BROKER_URL;
const queue = broker.startsWith("redis") ? "traces" : "traces.intake";
const client = celery.createClient(broker, process.env.KP_REDIS_URL ?? broker, queue);
await client.isReady();
for (const trace of readFileSync(0, "utf8").split("\n").filter(Boolean)) {
  const call = client.asTaskV2(randomUUID(), "score_trace", [JSON.parse(trace)], {});
  // task.applyAsync(…) sends the same, but says neither when it has nor that it could not.
  await client.broker.publish(call.body, "", queue, call.headers, call.properties);
}
await client.disconnect();
