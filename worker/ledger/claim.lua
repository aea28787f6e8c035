-- Claim pending traces whose messages must be lost: sent long ago, and the queue has been seen empty since.
--
-- KEYS  index of pending, counts, time when the queue was last seen empty
-- ARGV  prefix of a record's key, resend_after_ms, 1 if the queue is empty now, largest number to claim, ttl_ms of what is pending
-- Reply for each claimed: trace id, submission, how often it has been sent again, this time included

local pending, counts, drained = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[3] == '1' then redis.call('SET', drained, now, 'PX', ARGV[5]) end
-- A trace that waits in a long queue is not lost; sending it again would only make the queue longer.
local before = math.min(tonumber(redis.call('GET', drained) or 0), now - ARGV[2])

local reply = {}
for _, trace_id in ipairs(redis.call('ZRANGEBYSCORE', pending, '-inf', '(' .. before, 'LIMIT', 0, ARGV[4])) do
    local key = ARGV[1] .. trace_id
    local record = redis.call('HMGET', key, 'state', 'submission')
    if record[1] ~= 'pending' then
        -- Its record has expired after all this time; what is not known cannot be sent.
        redis.call('ZREM', pending, trace_id)
        redis.call('HINCRBY', counts, 'dead', 1)
    else
        redis.call('ZADD', pending, now, trace_id)
        -- Without the submission it came from another producer, and only its message can bring it back.
        if record[2] then
            redis.call('PEXPIRE', key, ARGV[5])
            reply[#reply + 1] = {trace_id, record[2], redis.call('HINCRBY', key, 'resends', 1)}
        end
    end
end
return reply
