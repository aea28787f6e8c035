-- Erase the entries of traces among the next ones of a novelty log, and note each for the mirrors that have read it.
--
-- KEYS   log, erasures
-- ARGV   start, count, erasures_ttl_ms, most, record_prefix, trace_ids...
-- Reply  (last, erased): the last entry looked at, empty at the end of the log; the trace id of each erased entry
--
-- The stream keeps at most `most` erasures.

local is_wanted = {}
for _, trace_id in ipairs(trace_ids) do is_wanted[trace_id] = true end

local last, erased = '', {}
for i, row in ipairs(redis.call('XRANGE', log, start, '+', 'COUNT', count)) do
    local entry, trace_id = row[1], row[2][2]
    if is_wanted[trace_id] then
        -- A note that a trace is no longer kept has no vector, so do not count it.
        if row[2][3] ~= 'r' then erased[#erased + 1] = trace_id end
        redis.call('XDEL', log, entry)
        redis.call('XADD', erasures, 'MAXLEN', '~', most, '*', 'e', entry)
        redis.call('PEXPIRE', erasures, erasures_ttl_ms)
        -- The script that erases the record may fail afterwards, and the record must not name an entry that is gone.
        redis.pcall('HDEL', record_prefix .. trace_id, 'epoch', 'entry')
    end
    if i == count then last = entry end
end
return {last, erased}
