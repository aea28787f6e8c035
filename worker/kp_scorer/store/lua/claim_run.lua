-- Claim a run that is due, and lease it to the caller: the preferred one, or else the one that has been due for longest. The claim
-- counts as an attempt until the caller revokes that. Due runs whose queues are full wait for full_ms more. Spans that have been kept
-- for long enough are removed.
--
-- Uses   run_spans
-- KEYS   runs, runs_bytes, runs_by_sender, runs_kept, run_prefix
-- ARGV   lease_ms, quiet_ms, open_ms, outcome_wait_ms, full_ms, preferred, full...
-- Reply  (run_id, fields): fields and values of the run; no run_id if none is due

use_reserve('zset', runs)
for _, run_id in ipairs(redis.call('ZRANGEBYSCORE', runs_kept, '-inf', now, 'LIMIT', 0, 100)) do
    remove_run(run_id, 'submitted')
end
-- Redis' clock may have gone back. By the present clock, no run can be due later than this.
local latest_ms = now + math.max(lease_ms, quiet_ms, open_ms, outcome_wait_ms)
for _, run_id in ipairs(redis.call('ZRANGEBYSCORE', runs, '(' .. string.format('%.0f', latest_ms), '+inf', 'LIMIT', 0, 100)) do
    redis.call('ZADD', runs, now + quiet_ms, run_id)
end

local is_full = {}
for _, queue in ipairs(full) do is_full[queue] = true end
local due = redis.call('ZRANGEBYSCORE', runs, '-inf', now, 'LIMIT', 0, 1000)
local preferred_ms = redis.call('ZSCORE', runs, preferred)
if preferred_ms and number(preferred_ms) <= now then table.insert(due, 1, preferred) end
for _, run_id in ipairs(due) do
    local run = run_prefix .. run_id
    local first_ms, queue = unpack(redis.call('HMGET', run, ':first_ms', ':queue'))
    if first_ms and is_full[queue or ''] then
        redis.call('ZADD', runs, now + full_ms, run_id)
    elseif first_ms then
        redis.call('ZADD', runs, now + lease_ms, run_id)
        -- The attempt is charged now, because a process that the run kills cannot charge it.
        redis.call('HSET', run, ':attempts', number(redis.call('HGET', run, ':attempts')) + 1)
        return {run_id, redis.call('HGETALL', run)}
    else
        -- The run has expired, or somebody has deleted it.
        leave_open(run_id)
    end
end
return {'', {}}
