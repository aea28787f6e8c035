import amqp from "amqplib";

const connection = await amqp.connect(process.env.KP_BROKER_URL);
const channel = await connection.createChannel();
let left = Number(process.argv[2] ?? Infinity);
await channel.prefetch(100);
for (const queue of ["decisions.accepted", "decisions.rejected"]) {
  await channel.consume(queue, async (message) => {
    if (left <= 0) return;
    console.log(message.content.toString());
    channel.ack(message);
    left -= 1;
    if (left > 0) return;
    await channel.close(); // answered once the acknowledgements have arrived
    await connection.close();
  });
}
