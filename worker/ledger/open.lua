-- Note submissions as pending, unless they are known.
--
-- KEYS  the records
-- ARGV  record's ttl_ms, then each one's content digest
-- Reply each one's state, or an empty string if its id was taken by other content

local reply = {}
for i = 1, #KEYS do
    local content = ARGV[1 + i]
    local record = redis.call('HMGET', KEYS[i], 'state', 'content')
    if record[1] ~= 'dead' and record[2] and record[2] ~= content then
        reply[i] = ''
    elseif record[1] == 'decided' then
        reply[i] = 'decided'
    else
        -- A dead trace submitted again gets another chance, with whatever content it has now.
        redis.call('HSET', KEYS[i], 'state', 'pending', 'content', content)
        redis.call('HDEL', KEYS[i], 'reason')
        redis.call('PEXPIRE', KEYS[i], ARGV[1])
        reply[i] = 'pending'
    end
end
return reply
