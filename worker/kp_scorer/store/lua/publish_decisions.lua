-- Publish decisions to a stream, even if Redis is full. A call without decisions only counts the unread ones.
--
-- KEYS   stream
-- ARGV   most, most_bytes, is_ring, decisions... (trace_id, decided_at, decision, traceparent, tracestate)
-- Reply  (published, unread, dropped): the numbers of decisions published now, unread afterwards, and dropped unread
--
-- The stream has room for `most` unread entries, and for `most_bytes`; 0 is no limit. A ring drops the oldest to make room
-- for the newest.

local MOST_EXACT = 2 ^ 53

local function is_before(id, other)
    local ms, number = string.match(id, '(%d+)-(%d+)')
    local other_ms, other_number = string.match(other, '(%d+)-(%d+)')
    ms, number, other_ms, other_number = tonumber(ms), tonumber(number), tonumber(other_ms), tonumber(other_number)
    return ms < other_ms or (ms == other_ms and number < other_number)
end

-- Return the id after an id, or the same id if Lua cannot count that far. No entry of ours has such an id.
local function after(id)
    local ms, number = string.match(id, '(%d+)-(%d+)')
    if tonumber(number) >= MOST_EXACT then return id end
    return string.format('%s-%.0f', ms, tonumber(number) + 1)
end

-- Remove the entries that every consumer group has acknowledged. Without a group, no entry is known to be read.
local function remove_acknowledged()
    if redis.call('XLEN', stream) == 0 then return end
    local first_unread
    for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
        local group = {}
        for i = 1, #info, 2 do group[info[i]] = info[i + 1] end
        local unread = after(group['last-delivered-id'])
        if group['pending'] > 0 then
            local oldest = redis.call('XPENDING', stream, group['name'])[2]
            if is_before(oldest, unread) then unread = oldest end
        end
        if not first_unread or is_before(unread, first_unread) then first_unread = unread end
    end
    if first_unread then redis.call('XTRIM', stream, 'MINID', first_unread) end
end

expect('stream', stream)

use_reserve('stream', stream)
remove_acknowledged()
local function size_of(i) return #decisions[i].decision end
local room = is_ring and #decisions or room_for(#decisions, size_of, stream, redis.call('XLEN', stream), most, most_bytes)
for i = 1, room do
    local entry = decisions[i]
    local fields = {'trace_id', entry.trace_id, 'decided_at', entry.decided_at, 'decision', entry.decision}
    for _, field in ipairs({'traceparent', 'tracestate'}) do
        if entry[field] ~= '' then fields[#fields + 1], fields[#fields + 2] = field, entry[field] end
    end
    redis.call('XADD', stream, '*', unpack(fields))
end

local function drop(count) redis.call('XTRIM', stream, 'MAXLEN', redis.call('XLEN', stream) - count) end
local function drop_one()
    local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
    redis.call('XDEL', stream, oldest[1])
    local bytes = 0
    for _, text in ipairs(oldest[2]) do bytes = bytes + #text end
    return bytes
end
local unread = redis.call('XLEN', stream)
local dropped = is_ring and drop_oldest(drop, drop_one, stream, unread, most, most_bytes) or 0
return {room, unread - dropped, dropped}
