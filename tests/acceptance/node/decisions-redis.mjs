import { createClient } from "redis";

const redis = await createClient({ url: process.env.KP_BROKER_URL }).connect();
const most = Number(process.argv[2] ?? Infinity);
for (let taken = 0; taken < most; taken += 1) {
  const { element } = await redis.brPop(["decisions.accepted", "decisions.rejected"], 0);
  console.log(Buffer.from(JSON.parse(element).body, "base64").toString());
}
await redis.close();
