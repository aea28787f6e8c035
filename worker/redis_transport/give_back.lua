-- Put a message in hand back on its queue, unless it is no longer in hand.
--
-- KEYS  queue, in hand, index of in hand
-- ARGV  the message's digest; RPUSH to have it taken next, LPUSH to have it taken last

local message = redis.call('HGET', KEYS[2], ARGV[1])
-- Removing comes first. Redis when full lets a script add only after that script has changed something.
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
if message then redis.call(ARGV[2], KEYS[1], message) end
return message and 1 or 0
