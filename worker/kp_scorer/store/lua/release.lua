-- Release traces that a worker no longer decides, though they have not ended, so that the next worker need not wait. Their record
-- keeps when this was: what waits in a worker for a store that refuses it is not lost.
--
-- KEYS   records...
-- ARGV   worker

for _, record in ipairs(records) do
    if read(record, 'owner') == worker then
        redis.call('HDEL', record, 'owner')
        redis.call('HSET', record, 'lease_ms', now)
    end
end
