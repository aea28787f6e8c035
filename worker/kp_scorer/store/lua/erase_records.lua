-- Remove the records of traces, and with them their decisions.
--
-- KEYS   pending, counts, record_prefix
-- ARGV   trace_ids...
-- Reply  for each trace the number of records removed: 0 or 1

local erased = {}
for i, trace_id in ipairs(trace_ids) do
    -- Decided and dead traces stay counted. A pending one would otherwise count as pending for ever.
    if redis.call('ZREM', pending, trace_id) == 1 then add(counts, 'submitted', -1) end
    erased[i] = redis.call('DEL', record_prefix .. trace_id)
end
return erased
