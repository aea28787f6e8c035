-- Put decisions on a stream, as many as it has room for, whether Redis is full or not.
--
-- KEYS  stream, counts of what was dropped
-- ARGV  what the stream is called in those counts, largest number of unread entries (0: any number), 1 if the oldest of them make
--       room; then trace id, mark, JSON, traceparent and tracestate of each decision, either of the last two empty if it has none
-- Reply how many were put, how many were dropped unread, and how many are unread now

local stream, dropped = KEYS[1], KEYS[2]
local name, most, drops_oldest = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'
local FIRST_DECISION, PARTS = 4, 5
expect('stream', stream)
expect('hash', dropped)

use_reserve(stream)
remove_acknowledged(stream)
local room = (#ARGV - FIRST_DECISION + 1) / PARTS
if most > 0 and not drops_oldest then room = math.max(0, math.min(room, most - redis.call('XLEN', stream))) end
for i = FIRST_DECISION, FIRST_DECISION + room * PARTS - 1, PARTS do
    local fields = {'trace_id', ARGV[i], 'decided_at', ARGV[i + 1], 'decision', ARGV[i + 2]}
    for at, name in ipairs({'traceparent', 'tracestate'}) do
        local value = ARGV[i + 2 + at]
        if value ~= '' then fields[#fields + 1], fields[#fields + 2] = name, value end
    end
    redis.call('XADD', stream, '*', unpack(fields))
end

local excess = 0
if most > 0 and drops_oldest then excess = math.max(0, redis.call('XLEN', stream) - most) end
if excess > 0 then
    redis.call('XTRIM', stream, 'MAXLEN', most)
    redis.call('HINCRBY', dropped, name, excess)
end
return {room, excess, redis.call('XLEN', stream)}
