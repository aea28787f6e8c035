-- What a message in flight is known by: its SHA-1. Whoever makes two messages with one SHA-1 loses neither, as the second is known by
-- another digest as long as the first is in flight.
local function digest_of(message)
    local digest = redis.sha1hex(message)
    local other = redis.call('HGET', unacknowledged, digest)
    -- Not behind the message: what ends alike keeps the same SHA-1.
    return other and other ~= message and redis.sha1hex(digest .. message) or digest
end
