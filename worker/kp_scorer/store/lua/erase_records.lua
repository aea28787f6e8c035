-- Remove the records of traces, their decisions with them.
--
-- KEYS   pending, counts, records...
-- ARGV   trace_ids...
-- Reply  for each trace how many records there were

local erased = {}
for i, record in ipairs(records) do
    -- Decided and dead traces stay counted. A pending one would otherwise count as pending for ever.
    if redis.call('ZREM', pending, trace_ids[i]) == 1 then add(counts, 'submitted', -1) end
    erased[i] = redis.call('DEL', record)
end
return erased
