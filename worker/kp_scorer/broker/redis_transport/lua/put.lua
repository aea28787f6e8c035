-- Put messages on a queue, whether Redis is full or not.
--
-- KEYS  queue
-- ARGV  the messages

local queue = KEYS[1]

use_reserve(queue)
redis.call('LPUSH', queue, unpack(ARGV))
