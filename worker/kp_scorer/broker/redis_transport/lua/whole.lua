-- Look up a message that was too large for a worker to read, by its beginning, which is what was delivered of it.
--
-- KEYS  oversized
-- ARGV  the beginning; 1 to remove all that begin so
-- Reply the newest that begins so, or nothing; nothing if it is removed

local oversized = KEYS[1]
local beginning, remove = ARGV[1], ARGV[2] == '1'

for place = redis.call('LLEN', oversized) - 1, 0, -1 do
    -- Where several of the same bytes were removed there may be nothing left.
    local message = redis.call('LINDEX', oversized, place)
    if message and string.sub(message, 1, #beginning) == beginning then
        if not remove then return message end
        redis.call('LREM', oversized, 0, message)
    end
end
return false
