-- Acknowledge messages. This is no transaction, because Redis refuses to queue its commands while it is full.
--
-- KEYS   unacknowledged, renewed, deliveries
-- ARGV   digests...

-- They go one by one, as unpack fails from some 8,000 on.
for _, digest in ipairs(digests) do
    redis.call('HDEL', unacknowledged, digest)
    redis.call('ZREM', renewed, digest)
    redis.call('HDEL', deliveries, digest)
end
