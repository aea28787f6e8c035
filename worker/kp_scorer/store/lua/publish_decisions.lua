-- Publish decisions to a stream, as many as it has room for, whether Redis is full or not; without any, count what is unread.
--
-- KEYS   stream
-- ARGV   most, most_bytes, decisions... (trace_id, decided_at, decision, traceparent, tracestate)
-- Reply  (published, unread): how many were published, how many are unread now
--
-- `most` unread entries have room, and `most_bytes` of them; any number if it is 0.

local MOST_EXACT = 2 ^ 53

local function is_before(id, other)
    local ms, number = string.match(id, '(%d+)-(%d+)')
    local other_ms, other_number = string.match(other, '(%d+)-(%d+)')
    ms, number, other_ms, other_number = tonumber(ms), tonumber(number), tonumber(other_ms), tonumber(other_number)
    return ms < other_ms or (ms == other_ms and number < other_number)
end

-- The id after this one. It is the same where Lua cannot count so far, which is where no entry of ours is.
local function after(id)
    local ms, number = string.match(id, '(%d+)-(%d+)')
    if tonumber(number) >= MOST_EXACT then return id end
    return string.format('%s-%.0f', ms, tonumber(number) + 1)
end

-- Remove what every consumer group has acknowledged. As long as there is no group, nothing is known to be read.
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
local room = room_for(#decisions, size_of, stream, redis.call('XLEN', stream), most, most_bytes)
for i = 1, room do
    local entry = decisions[i]
    local fields = {'trace_id', entry.trace_id, 'decided_at', entry.decided_at, 'decision', entry.decision}
    for _, field in ipairs({'traceparent', 'tracestate'}) do
        if entry[field] ~= '' then fields[#fields + 1], fields[#fields + 2] = field, entry[field] end
    end
    redis.call('XADD', stream, '*', unpack(fields))
end

return {room, redis.call('XLEN', stream)}
