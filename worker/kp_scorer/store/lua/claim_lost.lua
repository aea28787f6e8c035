-- Claim pending traces whose messages must be lost: each was last sent or held long ago, and every queue has been empty since.
--
-- KEYS   pending, counts, drained, record_prefix
-- ARGV   resend_after_ms, lease_ms, empty_ms_ago, most, forget_after_ms, wait_ms
-- Reply  (trace_id, payload, resends, digest) for each claimed trace; the payload is empty if the record or the index is damaged and
--        the trace leaves the index
--
-- A trace whose submission nobody stored is forgotten after forget_after_ms. A late outcome waits for its trace's decision, up to
-- wait_ms, and is then claimed until it is lost; `commit` sets its time to 0.

use_reserve('zset', pending)
if empty_ms_ago >= 0 then redis.call('SET', drained, string.format('%.0f', now - empty_ms_ago), 'PX', forget_after_ms) end
-- Redis' clock may have gone back since these were sent.
for _, trace_id in ipairs(redis.call('ZRANGEBYSCORE', pending, '(' .. string.format('%.0f', now), '+inf', 'LIMIT', 0, most)) do
    redis.call('ZADD', pending, now, trace_id)
end
-- A trace that waits in a long queue is not lost, and sending it again would make the queue longer.
local drained_ms = number(redis.call('GET', drained))
if drained_ms > now then drained_ms = 0 end
local before = math.max(1, math.min(drained_ms, now - resend_after_ms))

local reply = {}
for _, trace_id in ipairs(redis.call('ZRANGEBYSCORE', pending, '-inf', '(' .. string.format('%.0f', before), 'LIMIT', 0, most)) do
    local record = record_prefix .. trace_id
    local state, submission, resends, digest, since_ms, held_until_ms, revises =
        read(record, 'state', 'submission', 'resends', 'digest', 'since_ms', 'held_until_ms', 'revises')
    held_until_ms = number(held_until_ms)
    -- No lease is longer than lease_ms, so a later time was set before the clock went back.
    if held_until_ms > now + lease_ms then held_until_ms = 0 end
    if state ~= 'pending' then
        -- The record or the index is damaged. If the client stored the submission, the caller dead-letters it, which ends the trace.
        local has_ended = state == 'decided' or state == 'dead'
        local is_left = submission and not has_ended
        if is_left then
            redis.call('ZADD', pending, now, trace_id)
        else
            redis.call('ZREM', pending, trace_id)
            -- If the trace's message arrives, it is counted again. A record that a script has ended has no since_ms, and stays
            -- counted.
            if since_ms or not has_ended then add(counts, 'submitted', -1) end
        end
        reply[#reply + 1] = {trace_id, is_left and submission or '', 0, ''}
    elseif held_until_ms > now - resend_after_ms then
        -- A worker is deciding the trace, is waiting to decide it, or did either a short time ago.
        redis.call('ZADD', pending, math.min(now, held_until_ms), trace_id)
    elseif revises and now - number(since_ms) < wait_ms and read(record_prefix .. revises, 'state') ~= 'decided' then
        redis.call('ZADD', pending, now, trace_id)
    elseif submission then
        redis.call('ZADD', pending, now, trace_id)
        reply[#reply + 1] = {trace_id, submission, number(resends), digest or ''}
    elseif now - number(since_ms) < forget_after_ms then
        -- The trace came from another producer, and only its message holds its submission.
        redis.call('ZADD', pending, now, trace_id)
    else
        -- Somebody must have removed its message from the queue, and nothing else has the submission.
        redis.call('ZREM', pending, trace_id)
        redis.call('DEL', record)
        add(counts, 'submitted', -1)
    end
end
return reply
