-- Receive messages from a queue: note them as unacknowledged in the step that takes them off it.
--
-- Uses   messages
-- KEYS   queue, moving, unacknowledged, renewed, deliveries, oversized
-- ARGV   moved, most, most_bytes, call, largest_bytes, beginning_bytes, cut_mark, oversized_ttl_s
-- Reply  (message, receipt, deliveries) for each, in order
--
-- moved is a message that is in `moving`, unless `reclaim` has returned it to the queue, or empty. At most `most` messages are
-- received, and none after the first most_bytes. A message larger than largest_bytes is delivered as cut_mark and its first
-- beginning_bytes. call is unique; a client that loses its connection may call twice by it.

local MOST_POPPED = 8

use_reserve('hash', unacknowledged)
local messages, bytes = {}, 0

local function take(message)
    message = cut(message)
    messages[#messages + 1] = message
    bytes = bytes + #message
end

if moved ~= '' and redis.call('LREM', moving, 1, moved) == 1 then take(moved) end
-- Few are popped together, as they may be so large that most of them have to go back.
while #messages < most and bytes < most_bytes do
    local popped = redis.call('RPOP', queue, math.min(most - #messages, #messages + 1, MOST_POPPED)) or {}
    if #popped == 0 then break end
    while #popped > 0 and bytes < most_bytes do take(table.remove(popped, 1)) end
    while #popped > 0 do redis.call('RPUSH', queue, table.remove(popped)) end
end
if #messages == 0 then return {} end

-- Most often no message has come back: there is nothing that could expire, and nobody needs their digests.
local digests, known = {}, {}
if redis.call('EXPIRE', deliveries, DELIVERIES_TTL_S) == 1 then
    for i, message in ipairs(messages) do digests[i] = redis.sha1hex(message) end
    known = redis.call('HMGET', deliveries, unpack(digests))
end

local reply, fields, renewals, time = {}, {}, {}, table.concat(redis.call('TIME'), '.')
for i, message in ipairs(messages) do
    local delivery = number(known[i]) + 1
    local receipt = string.format('%s.%s.%d', call, time, i)
    if delivery > 1 then receipt = string.format('%s:%d:%s', receipt, delivery, digests[i]) end
    reply[i] = {message, receipt, delivery}
    fields[2 * i - 1], fields[2 * i] = receipt, message
    renewals[2 * i - 1], renewals[2 * i] = now, receipt
end
redis.call('HSET', unacknowledged, unpack(fields))
redis.call('ZADD', renewed, unpack(renewals))
return reply
