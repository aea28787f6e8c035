-- Release traces that a worker no longer decides, so that the next worker need not wait for the end of the lease. The record keeps
-- the time: while a worker retries the trace, its submission is not lost.
--
-- KEYS   records...
-- ARGV   worker

for _, record in ipairs(records) do
    if read(record, 'owner') == worker then
        redis.call('HDEL', record, 'owner')
        redis.call('HSET', record, 'lease_ms', now)
    end
end
