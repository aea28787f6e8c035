-- Acquire traces for a worker: read their records, create missing ones, and lease the pending traces to the worker.
--
-- Uses   ledger
-- KEYS   pending, counts, workers, record_prefix
-- Checks pending, workers
-- ARGV   worker, worker_lease_ms, remembered_ms, lease_ms, alone, identities... (trace_id, digest)
-- Reply  (state, digest, decision, reason, detail, attempts, is_held) for each trace; 1 for is_held if another worker holds it
--
-- Without another report, a worker counts as dead after worker_lease_ms and is forgotten after remembered_ms.

use_reserve('zset', pending)
call('ZADD', workers, now + worker_lease_ms, worker)
redis.call('PEXPIRE', workers, remembered_ms)

local reply = {}
for i, identity in ipairs(identities) do
    local trace_id, digest = identity.trace_id, identity.digest
    local record = record_prefix .. trace_id
    local state, known_digest, decision, reason, detail, attempts, owner, held_until_ms =
        read(record, 'state', 'digest', 'decision', 'reason', 'detail', 'attempts', 'owner', 'held_until_ms')
    if not state or (state == 'dead' and known_digest ~= digest) then
        to_pending(record, trace_id, digest, known_digest)
        state, known_digest, decision, reason, detail, attempts, owner = 'pending', digest, false, false, false, 0, false
    end
    attempts = number(attempts)
    local is_held = false
    if state == 'pending' and known_digest == digest then
        if owner and owner ~= worker then
            if number(redis.call('ZSCORE', workers, owner)) > now then
                -- No lease is longer than lease_ms, so a later time is damage.
                is_held = number(held_until_ms) > now and number(held_until_ms) <= now + lease_ms
            else
                -- That worker is dead, and the trace may have killed it.
                attempts = add(record, 'attempts', 1)
                redis.call('HDEL', record, 'owner', 'held_until_ms')
            end
        end
        if not is_held and (alone or attempts == 0) then
            redis.call('HSET', record, 'owner', worker, 'held_until_ms', now + lease_ms)
        end
    end
    reply[i] = {state, known_digest or '', decision or '', reason or '', detail or '', attempts, is_held and 1 or 0}
end
apply_changes()
return reply
