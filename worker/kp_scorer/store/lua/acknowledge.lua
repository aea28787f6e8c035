-- Acknowledge messages. A script, as a transaction would be refused while Redis is full.
--
-- KEYS   unacknowledged, renewed, deliveries
-- ARGV   digests...

-- One by one: unpack fails from some 8,000 on.
for _, digest in ipairs(digests) do
    redis.call('HDEL', unacknowledged, digest)
    redis.call('ZREM', renewed, digest)
    redis.call('HDEL', deliveries, digest)
end
