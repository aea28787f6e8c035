-- Claim pending traces whose messages must be lost: sent, and last in a worker's hands, long ago, and the queue has been seen empty
-- since.
--
-- KEYS  index of pending, counts, time when the queue was last seen empty
-- ARGV  prefix of a record's key, age in ms from which on a trace may be lost, 1 if the queue is empty now, largest number to
--       claim, ms for which a trace is kept of which there is nothing to send
-- Reply for each trace claimed: its id, its submission, how often it has been sent again, its digest

local pending, counts, drained = KEYS[1], KEYS[2], KEYS[3]
expect('zset', pending)
expect('hash', counts)
local record_prefix, resend_after_ms, queue_is_empty, most, kept_ms = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[4], ARGV[5]
local now = now_ms()

use_reserve(pending)
if queue_is_empty then redis.call('SET', drained, now, 'PX', kept_ms) end
-- A trace that waits in a long queue is not lost; sending it again would only make the queue longer.
local before = math.min(tonumber(redis.call('GET', drained) or 0), now - resend_after_ms)

local reply = {}
for _, trace_id in ipairs(redis.call('ZRANGEBYSCORE', pending, '-inf', '(' .. string.format('%.0f', before), 'LIMIT', 0, most)) do
    local record = record_prefix .. trace_id
    local submission, resends, digest, since_ms, held_until_ms =
        read(record, 'submission', 'resends', 'digest', 'since_ms', 'lease_ms')
    if tonumber(held_until_ms or 0) > now - resend_after_ms then
        -- A worker is deciding it, or waits to, or did lately.
        redis.call('ZADD', pending, math.min(now, held_until_ms), trace_id)
    elseif submission then
        redis.call('ZADD', pending, now, trace_id)
        reply[#reply + 1] = {trace_id, submission, tonumber(resends or 0), digest}
    elseif now - tonumber(since_ms or 0) < kept_ms + 0 then
        -- It came from another producer, and only its message can bring it back.
        redis.call('ZADD', pending, now, trace_id)
    else
        -- Its message has been removed from the queue by hand: there is nothing left of it.
        redis.call('ZREM', pending, trace_id)
        redis.call('DEL', record)
        redis.call('HINCRBY', counts, 'submitted', -1)
    end
end
return reply
