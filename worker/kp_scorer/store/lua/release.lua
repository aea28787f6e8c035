-- Release traces that a worker no longer decides, so that the next worker need not wait for the end of the lease. The record keeps
-- the time of the release, so that `claim_lost` does not take the submission for lost while a worker retries the trace.
--
-- KEYS   record_prefix
-- ARGV   worker, trace_ids...

for _, trace_id in ipairs(trace_ids) do
    local record = record_prefix .. trace_id
    if read(record, 'owner') == worker then
        redis.call('HDEL', record, 'owner')
        redis.call('HSET', record, 'held_until_ms', now)
    end
end
