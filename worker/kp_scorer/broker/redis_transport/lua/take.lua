-- Take one message off a queue and note that it is in hand, in one step.
--
-- KEYS  queue, taking, in hand, index of in hand, deliveries, oversized
-- ARGV  a message that was moved to `taking` already, or an empty string to take the next one; largest size in bytes, bytes to
--       deliver of a larger one, seconds to keep that
-- Reply the message, its digest, how often it has been delivered, all copies that are in hand at once being one delivery; or nothing
-- if the queue is empty

local queue, taking, in_hand, index, deliveries, oversized = unpack(KEYS)
local message, largest_bytes, beginning_bytes, oversized_ttl_s = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local DELIVERIES_TTL_S = 86400
expect('list', queue, taking, oversized)
expect('hash', in_hand, deliveries)
expect('zset', index)

use_reserve(in_hand)
if message == '' then
    message = redis.call('RPOP', queue)
    if not message then return false end
else
    redis.call('LREM', taking, 1, message)
end
if #message > largest_bytes then
    -- It could end every worker that reads it. Kept here, it is its beginning that goes on.
    keep_aside(oversized, message, oversized_ttl_s)
    message = string.sub(message, 1, beginning_bytes)
end
local digest = redis.sha1hex(message)
-- A copy of what is in hand is no sign that anybody failed to end it.
local is_copy = redis.call('HSET', in_hand, digest, message) == 0
redis.call('ZADD', index, now_ms(), digest)
local count = is_copy and redis.call('HGET', deliveries, digest) or redis.call('HINCRBY', deliveries, digest, 1)
redis.call('EXPIRE', deliveries, DELIVERIES_TTL_S)
return {message, digest, tonumber(count)}
