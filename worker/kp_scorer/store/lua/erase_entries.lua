-- Erase a trace's entries from a novelty log, and note that for those who have read them.
--
-- KEYS  log, head
-- ARGV  entry ids
-- Reply how many entries there were

local log, head = KEYS[1], KEYS[2]

local erased = 0
local time, place = unpack(redis.call('HMGET', head, 'time_ms', 'place'))
place = tonumber(place or 0)
for _, entry in ipairs(ARGV) do
    if redis.call('XDEL', log, entry) == 1 then
        erased = erased + 1
        place = place + 1
        -- In order with everything else: whoever reads on from any entry learns of it, and the next entry id is greater.
        redis.call('XADD', log, string.format('%s-%.0f', time, place), 'i', '', 'e', entry)
    end
end
if erased > 0 then
    redis.call('HSET', head, 'place', string.format('%.0f', place))
end
return erased
