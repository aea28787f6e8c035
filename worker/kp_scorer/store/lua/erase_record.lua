-- Remove a trace's record, its decision with it.
--
-- KEYS  index of pending, counts, record
-- ARGV  trace id
-- Reply how many records there were

local pending, counts, record = KEYS[1], KEYS[2], KEYS[3]
expect('zset', pending)
expect('hash', counts, record)
local trace_id = ARGV[1]

-- A decided or dead trace has been counted and stays so; one that is pending would otherwise be pending for ever.
if redis.call('ZREM', pending, trace_id) == 1 then redis.call('HINCRBY', counts, 'submitted', -1) end
return redis.call('DEL', record)
