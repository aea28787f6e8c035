-- Requeue an unacknowledged message, to be received next or last. Idempotent: it does nothing if the message is no longer in flight.
--
-- KEYS   queue, unacknowledged, renewed, deliveries
-- ARGV   digest, receive_next, counts_delivery

use_reserve('hash', unacknowledged)
local message = redis.call('HGET', unacknowledged, digest)
redis.call('ZREM', renewed, digest)
redis.call('HDEL', unacknowledged, digest)
if not message then return end
redis.call(receive_next and 'RPUSH' or 'LPUSH', queue, message)
if not counts_delivery then redis.call('HINCRBY', deliveries, digest, -1) end
