-- Store decisions; the first one of a trace wins.
--
-- KEYS  index of pending, counts, then the records
-- ARGV  record's ttl_ms, ttl_ms of what is pending, then for each: trace id, content digest, decision
-- Reply for each 1 if it was stored, the earlier decision if that stands, or an empty string if its id was taken by other content

local pending, counts, ttl_ms = KEYS[1], KEYS[2], ARGV[1]

local reply = {}
for i = 3, #KEYS do
    local argument = 3 + (i - 3) * 3
    local trace_id, content, decision = ARGV[argument], ARGV[argument + 1], ARGV[argument + 2]
    local record = redis.call('HMGET', KEYS[i], 'state', 'content', 'decision')
    if record[2] and record[2] ~= content then
        reply[#reply + 1] = ''
    elseif record[3] then
        reply[#reply + 1] = record[3]
    else
        -- Its record expired, or it died as another submission did, so this one has not been counted yet.
        if record[1] ~= 'pending' then redis.call('HINCRBY', counts, 'submitted', 1) end
        redis.call('HINCRBY', counts, 'decided', 1)
        redis.call('PEXPIRE', counts, ARGV[2])
        redis.call('ZREM', pending, trace_id)
        redis.call('HSET', KEYS[i], 'state', 'decided', 'content', content, 'decision', decision)
        redis.call('HDEL', KEYS[i], 'reason', 'attempts', 'resends', 'submission')
        redis.call('PEXPIRE', KEYS[i], ttl_ms)
        reply[#reply + 1] = 1
    end
end
return reply
