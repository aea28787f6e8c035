-- Hold on to what the caller has in hand, give back what dead consumers have left, and let messages of other priorities join
-- the queue. Removing comes first each time, as Redis when full lets a script add only after that script has changed something.
--
-- KEYS  queue, taking, in hand, index of in hand, oversized, then the lists of the queue's other priorities
-- ARGV  visibility timeout in ms, largest number of messages to move of each kind; largest size in bytes, bytes to give of a
--       larger message, seconds to keep that; then the digests that the caller holds

local queue, taking, in_hand, index, oversized = unpack(KEYS)
local most = tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- So however long deciding takes, only a consumer that is dead or stuck loses what it holds.
for i = 6, #ARGV do
    if redis.call('ZSCORE', index, ARGV[i]) then redis.call('ZADD', index, now, ARGV[i]) end
end

-- Moved and not noted yet: its consumer is about to, or is dead. Noting it here is right for both, as noting twice is the same
-- as noting once.
for _, message in ipairs(redis.call('LRANGE', taking, -most, -1)) do
    redis.call('LREM', taking, -1, message)
    if #message > tonumber(ARGV[3]) then
        -- As when it is taken; only then its consumer may have died of reading it.
        redis.call('RPUSH', oversized, message)
        redis.call('EXPIRE', oversized, ARGV[5])
        redis.call('RPUSH', queue, string.sub(message, 1, ARGV[4]))
    else
        local digest = redis.sha1hex(message)
        redis.call('HSET', in_hand, digest, message)
        redis.call('ZADD', index, now, digest)
    end
end

for _, digest in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now - ARGV[1], 'LIMIT', 0, most)) do
    local message = redis.call('HGET', in_hand, digest)
    redis.call('ZREM', index, digest)
    redis.call('HDEL', in_hand, digest)
    if message then redis.call('RPUSH', queue, message) end
end

for i = 6, #KEYS do
    for _ = 1, most do
        local message = redis.call('RPOP', KEYS[i])
        if not message then break end
        redis.call('LPUSH', queue, message)
    end
end
