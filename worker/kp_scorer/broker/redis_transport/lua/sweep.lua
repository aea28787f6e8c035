-- Hold on to what the caller has in hand, give back what dead consumers have left, and let messages of other priorities join
-- the queue.
--
-- KEYS  queue, taking, in hand, index of in hand, oversized, then the lists of the queue's other priorities
-- ARGV  visibility timeout in ms, largest number of messages to move of each kind; largest size in bytes, bytes to deliver of a
--       larger message, seconds to keep that; then the digests that the caller holds

local queue, taking, in_hand, index, oversized = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local visibility_timeout_ms, most = ARGV[1], tonumber(ARGV[2])
local largest_bytes, beginning_bytes, oversized_ttl_s = tonumber(ARGV[3]), ARGV[4], ARGV[5]
local FIRST_PRIORITY, FIRST_HELD = 6, 6
local now = now_ms()
expect('list', queue, taking, oversized, unpack(KEYS, FIRST_PRIORITY))
expect('hash', in_hand)
expect('zset', index)

use_reserve(in_hand)

-- So however long deciding takes, only a consumer that is dead or stuck loses what it holds.
for i = FIRST_HELD, #ARGV do
    local held = ARGV[i]
    if redis.call('ZSCORE', index, held) then redis.call('ZADD', index, now, held) end
end

-- Moved and not noted yet: its consumer is about to, or is dead. Noting it here is right for both, as noting twice is the same
-- as noting once.
for _, message in ipairs(redis.call('LRANGE', taking, -most, -1)) do
    redis.call('LREM', taking, -1, message)
    if #message > largest_bytes then
        -- As when it is taken; only then its consumer may have died of reading it.
        keep_aside(oversized, message, oversized_ttl_s)
        redis.call('RPUSH', queue, string.sub(message, 1, beginning_bytes))
    else
        local digest = redis.sha1hex(message)
        redis.call('HSET', in_hand, digest, message)
        redis.call('ZADD', index, now, digest)
    end
end

for _, digest in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now - visibility_timeout_ms, 'LIMIT', 0, most)) do
    local message = redis.call('HGET', in_hand, digest)
    redis.call('ZREM', index, digest)
    redis.call('HDEL', in_hand, digest)
    if message then redis.call('RPUSH', queue, message) end
end

for i = FIRST_PRIORITY, #KEYS do
    local priority = KEYS[i]
    for _ = 1, most do
        local message = redis.call('RPOP', priority)
        if not message then break end
        redis.call('LPUSH', queue, message)
    end
end
