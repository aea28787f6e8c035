-- Note that a submission has been sent again.
--
-- KEYS  index of pending, the trace's record
-- ARGV  trace id

local pending, record = KEYS[1], KEYS[2]
expect('zset', pending)
expect('hash', record)
local trace_id = ARGV[1]

use_reserve(pending)

-- Unless it has ended meanwhile.
if redis.call('ZADD', pending, 'XX', now_ms(), trace_id) and redis.call('HGET', record, 'state') == 'pending' then
    redis.call('HINCRBY', record, 'resends', 1)
end
