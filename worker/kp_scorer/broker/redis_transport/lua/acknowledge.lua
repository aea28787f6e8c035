-- Let go of a message in hand for good. A script, as a transaction would be refused while Redis is full.
--
-- KEYS  in hand, index of in hand, deliveries
-- ARGV  the message's digest

local in_hand, index, deliveries = KEYS[1], KEYS[2], KEYS[3]
local digest = ARGV[1]
expect('hash', in_hand, deliveries)
expect('zset', index)

redis.call('HDEL', in_hand, digest)
redis.call('ZREM', index, digest)
redis.call('HDEL', deliveries, digest)
