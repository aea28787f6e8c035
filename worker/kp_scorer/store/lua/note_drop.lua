-- Count a decision that is dropped unread.
--
-- KEYS  counts of what was dropped
-- ARGV  the queue it is dropped from

local dropped = KEYS[1]
local queue = ARGV[1]

use_reserve(dropped)
redis.call('HINCRBY', dropped, queue, 1)
