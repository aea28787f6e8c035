-- Remove a trace's record, its decision with it.
--
-- KEYS   pending, counts, record
-- ARGV   trace_id
-- Reply  how many records there were

expect('zset', pending)
expect('hash', counts)

-- A decided or dead trace has been counted and stays so; one that is pending would otherwise be pending for ever.
if redis.call('ZREM', pending, trace_id) == 1 then add(counts, 'submitted', -1) end
return redis.call('DEL', record)
