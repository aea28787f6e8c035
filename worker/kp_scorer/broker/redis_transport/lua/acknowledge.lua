-- Let go of messages in hand for good. A script, as a transaction would be refused while Redis is full.
--
-- KEYS  in hand, index of in hand, deliveries
-- ARGV  the messages' digests

local in_hand, index, deliveries = KEYS[1], KEYS[2], KEYS[3]
expect('hash', in_hand, deliveries)
expect('zset', index)

redis.call('HDEL', in_hand, unpack(ARGV))
redis.call('ZREM', index, unpack(ARGV))
redis.call('HDEL', deliveries, unpack(ARGV))
