-- Claim pending traces whose messages must be lost: sent long ago, and the queue has been seen empty since.
--
-- KEYS  index of pending, counts, time when the queue was last seen empty
-- ARGV  prefix of a record's key, age in ms from which on a trace may be lost, 1 if the queue is empty now, largest number to
--       claim, ttl of what is pending in ms
-- Reply for each trace claimed: its id, its submission, how often it has been sent again, this time included

local pending, counts, drained = KEYS[1], KEYS[2], KEYS[3]
local record_prefix, resend_after_ms, queue_is_empty, most, pending_ttl_ms = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[4], ARGV[5]
local now = now_ms()

if queue_is_empty then redis.call('SET', drained, now, 'PX', pending_ttl_ms) end
-- A trace that waits in a long queue is not lost; sending it again would only make the queue longer.
local before = math.min(tonumber(redis.call('GET', drained) or 0), now - resend_after_ms)

local reply = {}
for _, trace_id in ipairs(redis.call('ZRANGEBYSCORE', pending, '-inf', '(' .. before, 'LIMIT', 0, most)) do
    local record = record_prefix .. trace_id
    local state, submission = unpack(redis.call('HMGET', record, 'state', 'submission'))
    if state ~= 'pending' then
        -- Its record has expired after all this time; what is not known cannot be sent.
        redis.call('ZREM', pending, trace_id)
        redis.call('HINCRBY', counts, 'dead', 1)
    else
        redis.call('ZADD', pending, now, trace_id)
        -- Without the submission it came from another producer, and only its message can bring it back.
        if submission then
            redis.call('PEXPIRE', record, pending_ttl_ms)
            reply[#reply + 1] = {trace_id, submission, redis.call('HINCRBY', record, 'resends', 1)}
        end
    end
end
return reply
