-- Begin to decide traces: read their records, open those that came without, and count the attempt.
--
-- KEYS  index of pending, counts, then the records
-- ARGV  ttl_ms of what is pending; 1 to count an attempt that is not the first; then for each: trace id, content digest
-- Reply for each: state, content, decision, reason, attempts before this one

local pending, counts, ttl_ms, count_all = KEYS[1], KEYS[2], ARGV[1], ARGV[2] == '1'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local reply = {}
for i = 3, #KEYS do
    local argument = 3 + (i - 3) * 2
    local trace_id, content = ARGV[argument], ARGV[argument + 1]
    local record = redis.call('HMGET', KEYS[i], 'state', 'content', 'decision', 'reason', 'attempts')
    local attempts = tonumber(record[5] or 0)
    if not record[1] or (record[1] == 'dead' and record[2] ~= content) then
        redis.call('HINCRBY', counts, 'submitted', 1)
        redis.call('HDEL', KEYS[i], 'reason', 'attempts', 'resends', 'submission')
        redis.call('HSET', KEYS[i], 'state', 'pending', 'content', content)
        redis.call('PEXPIRE', KEYS[i], ttl_ms)
        redis.call('ZADD', pending, now, trace_id)
        redis.call('PEXPIRE', pending, ttl_ms)
        redis.call('PEXPIRE', counts, ttl_ms)
        record = {'pending', content, false, false}
        attempts = 0
    end
    if record[1] == 'pending' and record[2] == content and (attempts == 0 or count_all) then
        redis.call('HSET', KEYS[i], 'attempts', attempts + 1)
    end
    reply[#reply + 1] = {record[1], record[2] or '', record[3] or '', record[4] or '', attempts}
end
return reply
