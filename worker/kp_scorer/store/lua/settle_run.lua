-- Close a run, so that any process that claims it later submits the same trace; or let it wait for the spans that it lacks, or for
-- its outcome. If spans have come since it was claimed, it stays open, and is claimed once more.
--
-- KEYS   runs, run_prefix
-- ARGV   run_id, size_bytes, wait_ms, agent_span, outcome, outcome_wait_ms
-- Reply  1 if the run is closed, with these spans and this outcome
--
-- outcome is the late outcome, or 1 if the run needs none; if it is empty, the run waits for one, once, for outcome_wait_ms.

local run = run_prefix .. run_id
if number(redis.call('HGET', run, ':bytes')) ~= size_bytes then
    -- The process that converted the run is alive, so revoke its attempt. Otherwise a run whose spans keep coming would become poison
    -- after a few claims.
    redis.call('HDEL', run, ':attempts')
    return 0
end
-- A process that was stopped for longer than its claim lasts may have another outcome than the one that has closed the run since.
local closed = redis.call('HGET', run, ':closed')
if closed then return closed == outcome and 1 or 0 end
local until_ms = now + wait_ms
if wait_ms == 0 and outcome == '' and outcome_wait_ms > 0 then
    -- Redis' clock may have gone back since the wait began: by the present time, it ends no later than this.
    until_ms = math.min(number(redis.call('HGET', run, ':until_ms') or now + outcome_wait_ms), now + outcome_wait_ms)
    redis.call('HSET', run, ':until_ms', string.format('%.0f', until_ms))
    -- An outcome that has come since the run was claimed is looked for at once.
    if redis.call('HDEL', run, ':outcome') == 1 then until_ms = now + 1 end
end
if until_ms <= now then
    redis.call('HSET', run, ':closed', outcome ~= '' and outcome or 1, ':agent', agent_span)
    return 1
end
redis.call('HSET', run, ':has_waited', 1)
redis.call('HDEL', run, ':attempts')
redis.call('ZADD', runs, until_ms, run_id)
return 0
