-- Messages too large for a worker to read, kept for a person.

local OVERSIZED_MOST, OVERSIZED_BYTES = 100, 64 * 1024 * 1024

-- Keep a message, and of the older ones as many as the bounds allow. The newest stays whatever its size: its submission is about
-- to end as a dead letter of its beginning, and this is all there is of the rest.
local function keep_oversized(oversized, message, ttl_s)
    redis.call('RPUSH', oversized, message)
    redis.call('EXPIRE', oversized, ttl_s)
    local _, limit = memory()
    local most_bytes = limit > 0 and math.min(OVERSIZED_BYTES, limit / 4) or OVERSIZED_BYTES
    local kept, bytes = 1, #message
    while kept < OVERSIZED_MOST do
        local older = redis.call('LINDEX', oversized, -kept - 1)
        if not older then return end
        bytes = bytes + #older
        if bytes > most_bytes then break end
        kept = kept + 1
    end
    redis.call('LTRIM', oversized, -kept, -1)
end

