-- Remove the spans of a run that is dead, left out, forgotten or forwarded. Those of a submitted run are kept for kept_ms, to be
-- handed on.
--
-- Uses   run_spans
-- KEYS   runs, runs_bytes, runs_by_sender, runs_kept, run_prefix
-- ARGV   run_id, ended, kept_ms
-- Reply  1 if the run had spans

use_reserve('zset', runs)

local run = run_prefix .. run_id
-- Only a closed run has been decided. An open run with this id is a later one.
if ended == 'forwarded' and not redis.call('HGET', run, ':closed') then return 0 end
if ended ~= 'submitted' or kept_ms == 0 then return remove_run(run_id, ended) and 1 or 0 end
if not leave_open(run_id) then return 0 end
redis.call('ZADD', runs_kept, now + kept_ms, run_id)
redis.call('HSET', run, ':closed', ended)
-- A process that claims runs removes the spans in time. If there is no such process, they expire.
for _, key in ipairs({runs_kept, run}) do redis.call('PEXPIRE', key, kept_ms + REMEMBERED_MS) end
return 1
