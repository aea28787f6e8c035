// The reference SDK's engine as it is used there: fp32, one text at a time.
// node embed.mjs MODELS NAME reads a JSON list of texts a line, and answers each line with vectors and milliseconds.
import { createInterface } from "node:readline";
import { env, pipeline } from "@huggingface/transformers";

const [models, name] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = models;
const embed = await pipeline("feature-extraction", name, { dtype: "fp32" });

for await (const line of createInterface({ input: process.stdin })) {
  const vectors = [];
  const started = performance.now();
  for (const text of JSON.parse(line)) {
    const output = await embed(text, { pooling: "mean", normalize: true });
    vectors.push(Array.from(output.data));
  }
  console.log(JSON.stringify({ ms: performance.now() - started, vectors }));
}
