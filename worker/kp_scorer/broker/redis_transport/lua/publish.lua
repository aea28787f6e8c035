-- Publish messages to a queue, as many as it has room for, whether Redis is full or not.
--
-- KEYS   queue
-- ARGV   most, messages...
-- Reply  (published, unread): how many were published, how many are unread now
--
-- `most` messages have room, any number if it is 0.

use_reserve(queue)
local room = #messages
if most > 0 then room = math.max(0, math.min(room, most - redis.call('LLEN', queue))) end
-- One by one: unpack fails from some 8,000 on.
for i = 1, room do redis.call('LPUSH', queue, messages[i]) end
return {room, redis.call('LLEN', queue)}
