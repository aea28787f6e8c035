-- Look up a message that was too large for a worker to read, by its beginning, which is what was delivered of it.
--
-- KEYS  oversized
-- ARGV  the beginning; 1 to remove the message, and all that begin as it does
-- Reply the newest that begins so, or nothing

local oversized = KEYS[1]
local beginning, remove = ARGV[1], ARGV[2] == '1'

local whole = false
for _, message in ipairs(redis.call('LRANGE', oversized, 0, -1)) do
    if string.sub(message, 1, #beginning) == beginning then
        whole = message
        if remove then redis.call('LREM', oversized, 0, message) end
    end
end
return whole
