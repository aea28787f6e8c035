-- Read dead letters without their payloads, oldest first. The arguments select those whose id has this beginning, that have this
-- reason, whose trace id has this part, and that belong to these traces; an empty argument selects all.
--
-- KEYS   dead_letters, dead_letter_prefix
-- ARGV   last_ms, last_id, most, beginning, reason, part, trace_ids...
-- Reply  (last_ms, last_id, rows): the last that was looked at, empty at the end; (id, reason, detail, trace_id, worker, deliveries,
--        first_ms, last_ms, burials, queued_ms, size_bytes) for each
--
-- Reading continues behind last_id, which was last dead-lettered at last_ms. At most `most` are looked at.

local is_wanted = {}
for _, trace_id in ipairs(trace_ids) do is_wanted[trace_id] = true end

-- Dead letters of one millisecond are in the order of their ids.
local function behind_last()
    local offset = 0
    while true do
        local page = redis.call('ZRANGEBYSCORE', dead_letters, last_ms, '+inf', 'WITHSCORES', 'LIMIT', offset, most)
        for i = 1, #page, 2 do
            if tonumber(page[i + 1]) > last_ms or page[i] > last_id then return page, i end
        end
        if #page < 2 * most then return page, #page + 1 end
        offset = offset + most
    end
end

local function of_trace(dead_letter)
    if part == '' and #trace_ids == 0 then return true end
    local trace_id = redis.call('HGET', dead_letter, 'trace_id') or ''
    return (#trace_ids == 0 or is_wanted[trace_id]) and string.find(trace_id, part, 1, true)
end

local page, first = behind_last()
local rows = {}
for i = first, #page, 2 do
    local dead_letter = dead_letter_prefix .. page[i]
    if string.sub(page[i], 1, #beginning) == beginning and of_trace(dead_letter) then
        local fields = redis.call('HMGET', dead_letter, 'reason', 'detail', 'trace_id', 'worker', 'deliveries', 'first_ms', 'last_ms',
            'burials', 'queued_ms')
        -- A dead letter without a reason was dropped, or has expired.
        if fields[1] and (reason == '' or reason == fields[1]) then
            rows[#rows + 1] = {page[i], unpack(fields)}
            table.insert(rows[#rows], redis.call('HSTRLEN', dead_letter, 'payload'))
        end
    end
end
if #page < 2 * most then return {0, '', rows} end
return {tonumber(page[#page]), page[#page - 1], rows}
