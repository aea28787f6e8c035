-- Note submissions as pending before they are sent, unless they are known.
--
-- KEYS  index of pending, counts, then the records
-- ARGV  ttl_ms of what is pending, then for each: trace id, content digest, the submission itself
-- Reply for each its state, or an empty string if its id was taken by other content

local pending, counts, ttl_ms = KEYS[1], KEYS[2], ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local reply = {}
for i = 3, #KEYS do
    local argument = 2 + (i - 3) * 3
    local trace_id, content, submission = ARGV[argument], ARGV[argument + 1], ARGV[argument + 2]
    local record = redis.call('HMGET', KEYS[i], 'state', 'content')
    if record[1] and record[1] ~= 'dead' and record[2] ~= content then
        reply[#reply + 1] = ''
    elseif record[1] == 'decided' then
        reply[#reply + 1] = 'decided'
    else
        -- A dead trace submitted again gets another chance, as a new submission, with whatever content it has now.
        if record[1] ~= 'pending' then
            redis.call('HINCRBY', counts, 'submitted', 1)
            redis.call('HDEL', KEYS[i], 'reason', 'attempts', 'resends')
        end
        redis.call('HSET', KEYS[i], 'state', 'pending', 'content', content, 'submission', submission)
        redis.call('PEXPIRE', KEYS[i], ttl_ms)
        redis.call('ZADD', pending, now, trace_id)
        redis.call('PEXPIRE', pending, ttl_ms)
        redis.call('PEXPIRE', counts, ttl_ms)
        reply[#reply + 1] = 'pending'
    end
end
return reply
