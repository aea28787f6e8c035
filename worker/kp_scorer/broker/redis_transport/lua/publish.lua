-- Publish messages to a queue, as many as it has room for, whether Redis is full or not.
--
-- KEYS   queue
-- ARGV   most, drops_oldest, messages...
-- Reply  (published, dropped, unread): how many were published, how many others dropped for them unread, how many are unread now
--
-- `most` messages have room, any number if it is 0; with drops_oldest the oldest make room.

use_reserve(queue)
local room = #messages
if most > 0 and not drops_oldest then room = math.max(0, math.min(room, most - redis.call('LLEN', queue))) end
-- One by one: unpack fails from some 8,000 on.
for i = 1, room do redis.call('LPUSH', queue, messages[i]) end
local excess = 0
if most > 0 and drops_oldest then excess = math.max(0, redis.call('LLEN', queue) - most) end
if excess > 0 then redis.call('LTRIM', queue, 0, most - 1) end
return {room, excess, redis.call('LLEN', queue)}
