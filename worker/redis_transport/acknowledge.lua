-- Let go of a message in hand for good. A script, as a transaction would be refused while Redis is full.
--
-- KEYS  in hand, index of in hand, deliveries
-- ARGV  the message's digest

redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
