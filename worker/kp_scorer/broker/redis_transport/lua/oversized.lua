-- Messages too large for a worker to read: one could end every worker that does. All of it is kept for a person, and its beginning
-- goes on.

local OVERSIZED_MOST, OVERSIZED_BYTES = 100, 64 * 1024 * 1024

-- Keep a message, and of the older ones as many as the bounds allow. The newest stays whatever its size: its submission is about
-- to end as a dead letter of its beginning, and this is all there is of the rest.
local function keep_oversized(message)
    redis.call('RPUSH', oversized, message)
    redis.call('EXPIRE', oversized, oversized_ttl_s)
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

-- The message that goes on, and whether it was too large.
local function cut(message)
    if #message <= largest_bytes then return message, false end
    keep_oversized(message)
    return cut_mark .. string.sub(message, 1, beginning_bytes), true
end
