-- Acknowledge messages. This is no transaction, because Redis refuses to queue its commands while it is full.
--
-- KEYS   unacknowledged, renewed, deliveries
-- ARGV   digests...

call_with_all('HDEL', unacknowledged, digests)
call_with_all('ZREM', renewed, digests)
call_with_all('HDEL', deliveries, digests)
