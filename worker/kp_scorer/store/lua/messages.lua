-- What receiving and reclaiming do with a message.

local OVERSIZED_MOST, OVERSIZED_BYTES = 100, 64 * 1024 * 1024

-- Note a message as unacknowledged; return its digest, and whether a copy was noted before. The digest is its SHA-1. Whoever makes
-- two messages with one SHA-1 loses neither, as the second is known by another digest as long as the first is in flight.
local function note(message)
    local digest = redis.sha1hex(message)
    local other = redis.call('HGET', unacknowledged, digest)
    -- Not behind the message: what ends alike keeps the same SHA-1.
    if other and other ~= message then digest = redis.sha1hex(digest .. message) end
    redis.call('ZADD', renewed, now, digest)
    return digest, redis.call('HSET', unacknowledged, digest, message) == 0
end

-- Keep a message too large for a worker to read, and of the older ones as many as the bounds allow. The newest stays whatever its
-- size: its submission is about to end as a dead letter of its beginning, and this is all there is of the rest.
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

-- The message that goes on, and whether it was too large: one could end every worker that reads it. All of it is kept for a person.
local function cut(message)
    if #message <= largest_bytes then return message, false end
    keep_oversized(message)
    return cut_mark .. string.sub(message, 1, beginning_bytes), true
end
