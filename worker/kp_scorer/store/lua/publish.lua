-- Publish messages to a queue, as many as it has room for, whether Redis is full or not.
--
-- KEYS   queue
-- ARGV   most, most_bytes, messages...
-- Reply  (published, unread): how many were published, how many are unread now
--
-- `most` messages have room, and `most_bytes` of them; any number if it is 0.

use_reserve('list', queue)
local function size_of(i) return #messages[i] end
local room = room_for(#messages, size_of, queue, redis.call('LLEN', queue), most, most_bytes)
-- One by one: unpack fails from some 8,000 on.
for i = 1, room do redis.call('LPUSH', queue, messages[i]) end
return {room, redis.call('LLEN', queue)}
