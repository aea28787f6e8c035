-- Put a message in hand back on its queue, unless it is no longer in hand.
--
-- KEYS  queue, in hand, index of in hand, deliveries
-- ARGV  the message's digest; RPUSH to have it taken next, LPUSH to have it taken last; 0 if this delivery does not count

local queue, in_hand, index, deliveries = unpack(KEYS)
local digest, push, is_tried = ARGV[1], ARGV[2], ARGV[3] == '1'
expect('list', queue)
expect('hash', in_hand, deliveries)
expect('zset', index)

use_reserve(in_hand)
local message = redis.call('HGET', in_hand, digest)
redis.call('ZREM', index, digest)
redis.call('HDEL', in_hand, digest)
if not message then return 0 end
redis.call(push, queue, message)
if not is_tried then redis.call('HINCRBY', deliveries, digest, -1) end
return 1
