-- Receive messages from a queue: note them as unacknowledged in the step that takes them off it.
--
-- Uses   messages
-- KEYS   queue, moving, unacknowledged, renewed, deliveries, oversized
-- Checks queue, moving, unacknowledged, deliveries
-- ARGV   moved, most, most_bytes, call_name, largest_bytes, beginning_bytes, cut_mark, oversized_ttl_s
-- Reply  (message, receipt, deliveries) for each, in order
--
-- moved is empty, or a message that is in `moving` unless `reclaim` has returned it to the queue. At most `most` messages are
-- received, and no more once they have most_bytes. A message larger than largest_bytes is delivered as cut_mark and its first
-- beginning_bytes. call_name is unique, but a client that loses its connection may repeat a call with it.

local MOST_POPPED = 8

use_reserve('hash', unacknowledged)
-- Usually no message has come back. Then `deliveries` does not exist, EXPIRE replies 0, and no digests are needed.
local has_redelivered = redis.call('EXPIRE', deliveries, DELIVERIES_TTL_S) == 1
if has_redelivered then expect('hash', deliveries) end
local messages, bytes = {}, 0

local function take(message)
    message = cut(message)
    messages[#messages + 1] = message
    bytes = bytes + #message
end

local function take_and_note()
    if moved ~= '' then
        expect('list', queue)
        if call('LREM', moving, 1, moved) == 1 then take(moved) end
    end
    -- Pop only a few messages together, as they may be so large that most of them have to go back.
    while #messages < most and bytes < most_bytes do
        local popped = call('RPOP', queue, math.min(most - #messages, #messages + 1, MOST_POPPED)) or {}
        if #popped == 0 then break end
        while #popped > 0 and bytes < most_bytes do take(table.remove(popped, 1)) end
        while #popped > 0 do redis.call('RPUSH', queue, table.remove(popped)) end
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
    redis.call('ZADD', renewed, unpack(renewals))
    redis.call('HSET', unacknowledged, unpack(fields))
    return reply
end

-- Redis may refuse a command half-way, if this user has no permission for it. Then nothing is noted yet, as noting is the last step.
local is_done, reply = pcall(take_and_note)
if is_done then return reply end
for i = #messages, 1, -1 do redis.call('RPUSH', queue, messages[i]) end
error(reply, 0)
