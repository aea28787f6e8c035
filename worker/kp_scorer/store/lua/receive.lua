-- Receive messages from a queue: note them as unacknowledged in the step that takes them off it.
--
-- Uses   messages
-- KEYS   queue, moving, unacknowledged, renewed, deliveries, oversized
-- Checks queue, moving, unacknowledged, renewed, deliveries, oversized
-- ARGV   most, most_bytes, call_name, largest_bytes, beginning_bytes, cut_mark, oversized_ttl_s
-- Reply  (message, receipt, deliveries) for each, in order
--
-- At most `most` messages are received, and no more once they have most_bytes. A message larger than largest_bytes is delivered as
-- cut_mark and its first beginning_bytes. call_name is unique, but a client that loses its connection may repeat a call with it.

local MOST_READ = 8

-- Redis may refuse a command if this user has no permission for it. So messages are noted before they leave the queue, by a command
-- that is called here without effect.
use_reserve('list', queue)
return_moved()
-- Usually no message has come back. Then `deliveries` does not exist, EXPIRE replies 0, and no digests are needed.
local has_redelivered = redis.call('EXPIRE', deliveries, DELIVERIES_TTL_S) == 1
if has_redelivered then expect('hash', deliveries) end

local messages, bytes = {}, 0
while #messages < most and bytes < most_bytes do
    -- Read only a few messages together, as they may be so large that most of them have to stay.
    local count = math.min(most - #messages, #messages + 1, MOST_READ)
    local next_ones = redis.call('LRANGE', queue, -#messages - count, -#messages - 1)
    for i = #next_ones, 1, -1 do
        if bytes >= most_bytes then break end
        local message = cut(next_ones[i])
        messages[#messages + 1] = message
        bytes = bytes + #message
    end
    if #next_ones < count then break end
end
if #messages == 0 then return {} end

local digests, known = {}, {}
if has_redelivered then
    for i, message in ipairs(messages) do digests[i] = redis.sha1hex(message) end
    known = redis.call('HMGET', deliveries, unpack(digests))
end

local seconds, microseconds = unpack(redis.call('TIME'))
local received_ms = seconds * 1000 + math.floor(microseconds / 1000)
local reply, fields, renewals = {}, {}, {}
for i, message in ipairs(messages) do
    local delivery = number(known[i]) + 1
    local receipt = string.format('%s.%s.%s.%d', call_name, seconds, microseconds, i)
    if delivery > 1 then receipt = string.format('%s:%d:%s', receipt, delivery, digests[i]) end
    reply[i] = {message, receipt, delivery}
    fields[2 * i - 1], fields[2 * i] = receipt, message
    renewals[2 * i - 1], renewals[2 * i] = received_ms, receipt
end
call('ZADD', renewed, unpack(renewals))
call('HSET', unacknowledged, unpack(fields))
redis.call('LTRIM', queue, 0, -#messages - 1)
return reply
