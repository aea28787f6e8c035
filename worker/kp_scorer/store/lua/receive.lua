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
local messages, bytes = {}, 0

local function take(message)
    message = cut(message)
    messages[#messages + 1] = message
    bytes = bytes + #message
end

if moved ~= '' then
    redis.call('LREM', moving, 1, moved)
    take(moved)
end
while #messages < most and bytes < most_bytes do
    local message = redis.call('RPOP', queue)
    if not message then break end
    take(message)
end
if #messages == 0 then return {} end

local digests, are_copies = note(messages)
local reply, delivered = {}, {}
for i, count in ipairs(redis.call('HMGET', deliveries, unpack(digests))) do
    local known = delivered[digests[i]] or number(count)
    -- A copy of an unacknowledged message is no sign that a delivery failed. One that a sweep has noted was never delivered.
    delivered[digests[i]] = are_copies[i] and known > 0 and known or known + 1
    reply[i] = {messages[i], digests[i], delivered[digests[i]]}
end
local fields = {}
for digest, count in pairs(delivered) do fields[#fields + 1], fields[#fields + 2] = digest, count end
redis.call('HSET', deliveries, unpack(fields))
redis.call('EXPIRE', deliveries, DELIVERIES_TTL_S)
return reply
