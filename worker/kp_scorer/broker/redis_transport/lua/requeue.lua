-- Requeue an unacknowledged message, to be received next or last. Idempotent: nothing happens if it is no longer unacknowledged.
--
-- KEYS   queue, unacknowledged, renewed, deliveries
-- ARGV   digest, receive_next, counts_delivery
-- Reply  1 if the message was unacknowledged, else 0

use_reserve('hash', unacknowledged)
local message = redis.call('HGET', unacknowledged, digest)
redis.call('ZREM', renewed, digest)
redis.call('HDEL', unacknowledged, digest)
if not message then return 0 end
redis.call(receive_next and 'RPUSH' or 'LPUSH', queue, message)
if not counts_delivery then redis.call('HINCRBY', deliveries, digest, -1) end
return 1
