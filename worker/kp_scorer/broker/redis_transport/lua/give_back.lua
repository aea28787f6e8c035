-- Put a message in hand back on its queue, unless it is no longer in hand.
--
-- KEYS  queue, in hand, index of in hand
-- ARGV  the message's digest; RPUSH to have it taken next, LPUSH to have it taken last

local queue, in_hand, index = KEYS[1], KEYS[2], KEYS[3]
local digest, push = ARGV[1], ARGV[2]
expect('list', queue)
expect('hash', in_hand)
expect('zset', index)

use_reserve(in_hand)
local message = redis.call('HGET', in_hand, digest)
redis.call('ZREM', index, digest)
redis.call('HDEL', in_hand, digest)
if message then redis.call(push, queue, message) end
return message and 1 or 0
