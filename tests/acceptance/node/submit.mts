import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { homedir } from "node:os";
import { createClient } from "redis";

const note = `${process.env.XDG_STATE_HOME || `${homedir()}/.local/state`}/kp-scorer/embedded.json`;
const url: string = process.env.KP_BROKER_URL || JSON.parse(readFileSync(note, "utf8")).url;
const redis = await createClient({ url }).connect();
const id = `kp:trace:${randomUUID()}`;
await redis.lPush("traces", JSON.stringify({
  "@context": "https://openknowledgepulse.org/schema/v1", "@type": "ReasoningTrace", id,
  metadata: { created_at: new Date().toISOString(), task_domain: "code", success: true, visibility: "org", privacy_level: "private" },
  task: { objective: "Find out why the nightly build fails" },
  steps: [{ step_id: 0, type: "tool_call", tool: { name: "openssl" }, content: "When does the certificate end?" }],
  outcome: { result_summary: "The certificate had ended, and was renewed.", confidence: 0.9 },
}));
let [state, decision, reason, detail]: (string | null)[] = [];
while (state !== "decided" && state !== "dead") {
  await new Promise((go) => setTimeout(go, 50));
  [state, decision, reason, detail] = await redis.hmGet(`kp:trace:${id}`, ["state", "decision", "reason", "detail"]);
}
console.log(decision ?? { id, state, reason, detail });
await redis.close();
