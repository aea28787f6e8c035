-- Tell what is kept of messages that were too large for a worker to read. No more than one of them is copied at a time.
--
-- KEYS  oversized
-- ARGV  size of a beginning in bytes
-- Reply beginning and size in bytes of each, in turn, the oldest first

local oversized = KEYS[1]
local beginning_bytes = tonumber(ARGV[1])

local found = {}
for place = 0, redis.call('LLEN', oversized) - 1 do
    local message = redis.call('LINDEX', oversized, place)
    table.insert(found, string.sub(message, 1, beginning_bytes))
    table.insert(found, #message)
end
return found
