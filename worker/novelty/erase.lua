-- Erase a trace's entries from a novelty log, and note that for those who have read them.
--
-- KEYS  log, head
-- ARGV  entry ids
-- Reply how many entries there were

local erased = 0
local head = redis.call('HMGET', KEYS[2], 'time_ms', 'place')
local place = tonumber(head[2] or 0)
for i = 1, #ARGV do
    if redis.call('XDEL', KEYS[1], ARGV[i]) == 1 then
        erased = erased + 1
        place = place + 1
        -- In order with everything else: whoever reads on from any entry learns of it, and the next entry id is greater.
        redis.call('XADD', KEYS[1], string.format('%s-%.0f', head[1], place), 'i', '', 'e', ARGV[i])
    end
end
if erased > 0 then
    redis.call('HSET', KEYS[2], 'place', string.format('%.0f', place))
end
return erased
