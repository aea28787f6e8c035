-- Renew the caller's messages in flight, reclaim those of dead consumers, and move messages of other priorities to the queue.
--
-- Uses   messages
-- KEYS   queue, moving, unacknowledged, renewed, oversized, priorities...
-- ARGV   visibility_timeout_ms, most, largest_bytes, beginning_bytes, cut_mark, oversized_ttl_s, in_flight...
--
-- At most `most` messages of each kind are moved. in_flight holds digests.

for _, priority in ipairs(priorities) do expect('list', priority) end

use_reserve('hash', unacknowledged)

-- However long deciding takes, only a dead or stalled consumer loses its messages.
for _, digest in ipairs(in_flight) do
    if redis.call('ZSCORE', renewed, digest) then redis.call('ZADD', renewed, now, digest) end
end

-- The consumer of a message in `moving` is about to note it, or is dead. Noting it here is right for both, as it is idempotent.
local whole = {}
for _, message in ipairs(redis.call('LRANGE', moving, -most, -1)) do
    redis.call('LREM', moving, -1, message)
    local beginning, is_too_large = cut(message)
    if is_too_large then
        -- Deliver only its beginning, which ends no consumer that reads it.
        redis.call('RPUSH', queue, beginning)
    else
        whole[#whole + 1] = message
    end
end
note(whole)

-- Redis' clock may have gone back since these were renewed.
for _, digest in ipairs(redis.call('ZRANGEBYSCORE', renewed, '(' .. string.format('%.0f', now), '+inf', 'LIMIT', 0, most)) do
    redis.call('ZADD', renewed, now, digest)
end
for _, digest in ipairs(redis.call('ZRANGEBYSCORE', renewed, '-inf', now - visibility_timeout_ms, 'LIMIT', 0, most)) do
    local message = redis.call('HGET', unacknowledged, digest)
    redis.call('ZREM', renewed, digest)
    redis.call('HDEL', unacknowledged, digest)
    if message then redis.call('RPUSH', queue, message) end
end

for _, priority in ipairs(priorities) do
    for _ = 1, most do
        local message = redis.call('RPOP', priority)
        if not message then break end
        redis.call('LPUSH', queue, message)
    end
end
