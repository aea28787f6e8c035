-- Close a run, so that whoever claims it after this process submits the same trace; or let it wait for the spans that it lacks. If
-- spans have come since it was claimed, it is claimed once more after those.
--
-- KEYS   runs, run_prefix
-- ARGV   run_id, count, wait_ms, agent_span
-- Reply  1 if the run is closed

local run = run_prefix .. run_id
if redis.call('HGET', run, ':closed') then return 1 end
if number(redis.call('HGET', run, ':spans')) ~= count then return 0 end
if wait_ms == 0 then
    redis.call('HSET', run, ':closed', 1, ':agent', agent_span)
    return 1
end
redis.call('HSET', run, ':has_waited', 1)
redis.call('HDEL', run, ':attempts')
redis.call('ZADD', runs, now + wait_ms, run_id)
return 0
