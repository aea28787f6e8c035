-- Remove the spans of a run that is submitted, dead or to be forgotten. Their ids stay for a while, because an exporter without an
-- answer sends its spans again.
--
-- KEYS   runs, runs_bytes, run_prefix
-- ARGV   run_id, is_dead, remembered_ms
-- Reply  1 if its spans were there

use_reserve('zset', runs)

local run = run_prefix .. run_id
if redis.call('ZREM', runs, run_id) == 0 then return 0 end
local left = number(redis.call('GET', runs_bytes)) - number(redis.call('HGET', run, ':bytes'))
local fields = redis.call('HGETALL', run)
for i = 1, #fields, 2 do if fields[i] ~= ':agent' then redis.call('HSET', run, fields[i], '') end end
redis.call('HSET', run, ':closed', is_dead and 'dead' or 1)
redis.call('PEXPIRE', run, remembered_ms)
-- Counts may have been lost on the way, but without runs there are no bytes.
if redis.call('ZCARD', runs) == 0 or left <= 0 then
    redis.call('DEL', runs_bytes)
else
    redis.call('SET', runs_bytes, string.format('%.0f', left), 'KEEPTTL')
end
return 1
