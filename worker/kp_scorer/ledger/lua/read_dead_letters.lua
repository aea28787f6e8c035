-- Read dead letters without their payloads: of this reason and of these traces, if any are named, with this part in the trace's id.
--
-- KEYS   dead_letters...
-- ARGV   reason, part, trace_ids...
-- Reply  (key, reason, detail, trace_id, deliveries, first_ms, last_ms, burials, size_bytes) for each

local is_wanted = {}
for _, trace_id in ipairs(trace_ids) do is_wanted[trace_id] = true end

local rows = {}
for _, dead_letter in ipairs(dead_letters) do
    local fields = redis.call('HMGET', dead_letter, 'reason', 'detail', 'trace_id', 'deliveries', 'first_ms', 'last_ms', 'burials')
    local died_of, _, trace_id = unpack(fields)
    -- One without a reason was dropped, or has expired.
    if died_of and (reason == '' or reason == died_of) and (#trace_ids == 0 or is_wanted[trace_id])
        and string.find(trace_id or '', part, 1, true) then
        rows[#rows + 1] = {dead_letter, unpack(fields)}
        table.insert(rows[#rows], redis.call('HSTRLEN', dead_letter, 'payload'))
    end
end
return rows
