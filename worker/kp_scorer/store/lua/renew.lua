-- Note that a worker is alive, store its report, renew the leases of its traces, and forget workers that ended long ago.
--
-- KEYS   workers, record_prefix, report
-- ARGV   text, worker, worker_lease_ms, remembered_ms, lease_ms, trace_ids...
-- Reply  for each trace 1 if the worker holds it, else 0

-- Removing comes first, because a full Redis lets a script add something only then.
redis.call('ZREMRANGEBYSCORE', workers, '-inf', now - remembered_ms)
redis.call('ZADD', workers, now + worker_lease_ms, worker)
redis.call('PEXPIRE', workers, remembered_ms)
redis.call('SET', report, text, 'PX', worker_lease_ms)

local reply = {}
for i, trace_id in ipairs(trace_ids) do
    local record = record_prefix .. trace_id
    local is_held = read(record, 'owner') == worker
    if is_held then redis.call('HSET', record, 'held_until_ms', now + lease_ms) end
    reply[i] = is_held and 1 or 0
end
return reply
