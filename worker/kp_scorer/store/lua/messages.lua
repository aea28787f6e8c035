-- The steps that receiving and reclaiming share.

local OVERSIZED_MOST, OVERSIZED_BYTES = 100, 64 * 1024 * 1024

-- Note a message as unacknowledged; return its digest, and whether a copy was noted before. The digest is its SHA-1. If somebody
-- makes two messages with one SHA-1, the second gets another digest as long as the first is in flight, so that neither is lost.
local function note(message)
    local digest = redis.sha1hex(message)
    local other = redis.call('HGET', unacknowledged, digest)
    -- The digest goes before the message: a shared suffix would preserve the collision.
    if other and other ~= message then digest = redis.sha1hex(digest .. message) end
    redis.call('ZADD', renewed, now, digest)
    return digest, redis.call('HSET', unacknowledged, digest, message) == 0
end

-- Keep a message that is too large for a worker to read, and as many older ones as the bounds allow. The newest stays whatever its
-- size: its submission is about to become a dead letter of its beginning, and only this list has the rest.
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

-- Return the message that goes on, and whether it was cut: one that is too large could end every worker that reads it.
local function cut(message)
    if #message <= largest_bytes then return message, false end
    keep_oversized(message)
    return cut_mark .. string.sub(message, 1, beginning_bytes), true
end
