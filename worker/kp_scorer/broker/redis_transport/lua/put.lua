-- Put a message on a queue, whether Redis is full or not.
--
-- KEYS  queue
-- ARGV  the message

local queue = KEYS[1]
local message = ARGV[1]

use_reserve(queue)
redis.call('LPUSH', queue, message)
