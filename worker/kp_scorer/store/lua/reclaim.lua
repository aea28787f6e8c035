-- Renew the caller's messages in flight, reclaim those of dead consumers, and move messages of other priorities to the queue.
--
-- Uses   messages
-- KEYS   queue, moving, unacknowledged, renewed, deliveries, oversized, priorities...
-- ARGV   visibility_timeout_ms, most, largest_bytes, beginning_bytes, cut_mark, oversized_ttl_s, in_flight...
--
-- At most `most` messages of each kind are moved. in_flight holds receipts.

for _, priority in ipairs(priorities) do expect('list', priority) end

-- Redis may refuse a command if this user has no permission for it. So each message is on the queue before it leaves where it was,
-- by a command that is called here without effect, as otherwise every call would add another copy.
use_reserve('hash', unacknowledged)
use_reserve('zset', renewed)

-- However long deciding takes, only a dead or stalled consumer loses its messages.
local renewals = {}
for i, receipt in ipairs(in_flight) do renewals[2 * i - 1], renewals[2 * i] = now, receipt end
for i = 1, #renewals, 1000 do redis.call('ZADD', renewed, 'XX', unpack(renewals, i, math.min(i + 999, #renewals))) end

return_moved()
-- Redis' clock may have gone back since these were renewed.
for _, receipt in ipairs(redis.call('ZRANGEBYSCORE', renewed, '(' .. string.format('%.0f', now), '+inf', 'LIMIT', 0, most)) do
    redis.call('ZADD', renewed, now, receipt)
end
for _, receipt in ipairs(redis.call('ZRANGEBYSCORE', renewed, '-inf', now - visibility_timeout_ms, 'LIMIT', 0, most)) do
    local message = redis.call('HGET', unacknowledged, receipt)
    if message then redis.call('RPUSH', queue, message) end
    redis.call('ZREM', renewed, receipt)
    redis.call('HDEL', unacknowledged, receipt)
    if message then count_delivery(receipt, message) end
end

for _, priority in ipairs(priorities) do
    for _ = 1, most do
        local message = redis.call('LINDEX', priority, -1)
        if not message then break end
        redis.call('LPUSH', queue, message)
        redis.call('LTRIM', priority, 0, -2)
    end
end
