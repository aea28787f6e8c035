-- Remove a trace's record, its decision with it.
--
-- KEYS  index of pending, counts, record
-- ARGV  trace id
-- Reply how many records there were

-- A decided or dead trace has been counted and stays so; one that is pending would otherwise be pending for ever.
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 then redis.call('HINCRBY', KEYS[2], 'submitted', -1) end
return redis.call('DEL', KEYS[3])
