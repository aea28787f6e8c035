-- Receive messages from a queue: note them as unacknowledged in the step that takes them off it.
--
-- Uses   messages
-- KEYS   queue, moving, unacknowledged, renewed, deliveries, oversized
-- ARGV   moved, most, most_bytes, largest_bytes, beginning_bytes, cut_mark, oversized_ttl_s
-- Reply  (message, digest, deliveries) for each, in order; copies that are unacknowledged at once are one delivery
--
-- moved is a message that is in `moving` already, or empty. At most `most` messages are received, and none after the first
-- most_bytes. A message larger than largest_bytes is delivered as cut_mark and its first beginning_bytes.

local DELIVERIES_TTL_S = 86400

use_reserve('hash', unacknowledged)
local reply, bytes = {}, 0

local function deliver(message)
    message = cut(message)
    local digest, is_copy = note(message)
    -- A copy of an unacknowledged message is no sign that a delivery failed.
    local count = is_copy and redis.call('HGET', deliveries, digest) or redis.call('HINCRBY', deliveries, digest, 1)
    reply[#reply + 1] = {message, digest, tonumber(count)}
    bytes = bytes + #message
end

if moved ~= '' then
    redis.call('LREM', moving, 1, moved)
    deliver(moved)
end
while #reply < most and bytes < most_bytes do
    local message = redis.call('RPOP', queue)
    if not message then break end
    deliver(message)
end
if #reply > 0 then redis.call('EXPIRE', deliveries, DELIVERIES_TTL_S) end
return reply
