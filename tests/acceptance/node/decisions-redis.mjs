import { createClient } from "redis";

const redis = await createClient({ url: process.env.KP_BROKER_URL }).connect();
const most = Number(process.argv[2] ?? Infinity);
for (let taken = 0; taken < most; taken += 1) {
  const { element } = await redis.brPop(["decisions.accepted", "decisions.rejected"], 0);
  const item = JSON.parse(element);
  // In an envelope, unless the workers' settings say results.plain.
  const decision = item.body ? JSON.parse(Buffer.from(item.body, "base64")) : item;
  console.log(JSON.stringify(decision));
}
await redis.close();
