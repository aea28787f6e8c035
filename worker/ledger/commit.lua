-- Store decisions; the first one of a trace wins.
--
-- KEYS  the records
-- ARGV  record's ttl_ms, then for each its content digest and its decision
-- Reply for each 1 if it was stored, the earlier decision if that stands, or an empty string if its id was taken by other content

local reply = {}
for i = 1, #KEYS do
    local content, decision = ARGV[2 * i], ARGV[2 * i + 1]
    local record = redis.call('HMGET', KEYS[i], 'content', 'decision')
    if record[1] and record[1] ~= content then
        reply[i] = ''
    elseif record[2] then
        reply[i] = record[2]
    else
        redis.call('HSET', KEYS[i], 'state', 'decided', 'content', content, 'decision', decision)
        redis.call('HDEL', KEYS[i], 'reason')
        redis.call('PEXPIRE', KEYS[i], ARGV[1])
        reply[i] = 1
    end
end
return reply
