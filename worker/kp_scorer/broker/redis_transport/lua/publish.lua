-- Publish messages to a queue, as many as it has room for, whether Redis is full or not.
--
-- KEYS   queue
-- ARGV   most, most_bytes, messages...
-- Reply  (published, unread): how many were published, how many are unread now
--
-- `most` messages have room, and `most_bytes` of them; any number if it is 0.

use_reserve('list', queue)
local room = #messages
if most > 0 then room = math.max(0, math.min(room, most - redis.call('LLEN', queue))) end
if most_bytes > 0 then room = room_within(most_bytes, queue, room, function(i) return #messages[i] end) end
-- One by one: unpack fails from some 8,000 on.
for i = 1, room do redis.call('LPUSH', queue, messages[i]) end
return {room, redis.call('LLEN', queue)}
