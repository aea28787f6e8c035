-- The steps that receiving and reclaiming have in common.

local OVERSIZED_MOST, OVERSIZED_BYTES = 100, 64 * 1024 * 1024

-- Note at most 1,000 messages as unacknowledged; return their digests, and for each whether a copy was noted before. A digest is the
-- SHA-1 of its message. If somebody makes two messages with one SHA-1, the second gets another digest as long as the first is in
-- flight, so that neither is lost.
local function note(messages)
    if #messages == 0 then return {}, {} end
    local digests, are_copies, noted, fields, renewals = {}, {}, {}, {}, {}
    for i, message in ipairs(messages) do digests[i] = redis.sha1hex(message) end
    for i, other in ipairs(redis.call('HMGET', unacknowledged, unpack(digests))) do noted[digests[i]] = other or nil end
    for i, message in ipairs(messages) do
        if (noted[digests[i]] or message) ~= message then
            -- The digest goes before the message: a shared suffix would preserve the collision.
            digests[i] = redis.sha1hex(digests[i] .. message)
            noted[digests[i]] = noted[digests[i]] or redis.call('HGET', unacknowledged, digests[i]) or nil
        end
        are_copies[i] = noted[digests[i]] ~= nil
        noted[digests[i]] = message
        fields[2 * i - 1], fields[2 * i] = digests[i], message
        renewals[2 * i - 1], renewals[2 * i] = now, digests[i]
    end
    redis.call('HSET', unacknowledged, unpack(fields))
    redis.call('ZADD', renewed, unpack(renewals))
    return digests, are_copies
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

-- Return the message to deliver, and whether it was cut: a message that is too large could end every worker that reads it.
local function cut(message)
    if #message <= largest_bytes then return message, false end
    keep_oversized(message)
    return cut_mark .. string.sub(message, 1, beginning_bytes), true
end
