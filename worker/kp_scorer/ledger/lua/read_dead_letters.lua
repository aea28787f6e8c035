-- Read some dead letters without their payloads, oldest first.
--
-- KEYS   dead_letters
-- ARGV   dead_letter_prefix, last_ms, last_id, most
-- Reply  (last_ms, last_id, rows): the last that was looked at, empty at the end; (id, reason, detail, trace_id, worker, deliveries,
--        first_ms, last_ms, burials, queued_ms, size_bytes) for each
--
-- It goes on behind last_id, which was last dead-lettered at last_ms. No more than `most` are looked at.

-- Those of one millisecond are in the order of their ids.
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

local page, first = behind_last()
local rows = {}
for i = first, #page, 2 do
    local dead_letter = dead_letter_prefix .. page[i]
    local fields = redis.call('HMGET', dead_letter, 'reason', 'detail', 'trace_id', 'worker', 'deliveries', 'first_ms', 'last_ms',
        'burials', 'queued_ms')
    -- One without a reason was dropped, or has expired.
    if fields[1] then
        rows[#rows + 1] = {page[i], unpack(fields)}
        table.insert(rows[#rows], redis.call('HSTRLEN', dead_letter, 'payload'))
    end
end
if #page < 2 * most then return {0, '', rows} end
return {tonumber(page[#page]), page[#page - 1], rows}
