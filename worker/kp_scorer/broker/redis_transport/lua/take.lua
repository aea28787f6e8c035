-- Take messages off a queue and note that they are in hand, in one step.
--
-- KEYS  queue, taking, in hand, index of in hand, deliveries, oversized
-- ARGV  a message that was moved to `taking` already, or an empty string to take the next ones; how many of them at most, and how
--       many bytes of them before the last; largest size in bytes, bytes to deliver of a larger message, seconds to keep that
-- Reply for each, in order, the message, its digest, how often it has been delivered, all copies that are in hand at once being
--       one delivery

local queue, taking, in_hand, index, deliveries, oversized = unpack(KEYS)
local moved, most, most_bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local largest_bytes, beginning_bytes, oversized_ttl_s = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local DELIVERIES_TTL_S = 86400
expect('list', queue, taking, oversized)
expect('hash', in_hand, deliveries)
expect('zset', index)

use_reserve(in_hand)
local now, taken, bytes = now_ms(), {}, 0

local function take(message)
    if #message > largest_bytes then
        -- It could end every worker that reads it. Kept here, it is its beginning that goes on.
        keep_aside(oversized, message, oversized_ttl_s)
        message = string.sub(message, 1, beginning_bytes)
    end
    local digest = redis.sha1hex(message)
    -- A copy of what is in hand is no sign that anybody failed to end it.
    local is_copy = redis.call('HSET', in_hand, digest, message) == 0
    redis.call('ZADD', index, now, digest)
    local count = is_copy and redis.call('HGET', deliveries, digest) or redis.call('HINCRBY', deliveries, digest, 1)
    table.insert(taken, {message, digest, tonumber(count)})
    bytes = bytes + #message
end

if moved ~= '' then
    redis.call('LREM', taking, 1, moved)
    take(moved)
end
while #taken < most and bytes < most_bytes do
    local message = redis.call('RPOP', queue)
    if not message then break end
    take(message)
end
if #taken > 0 then redis.call('EXPIRE', deliveries, DELIVERIES_TTL_S) end
return taken
