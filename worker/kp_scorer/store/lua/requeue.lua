-- Requeue an unacknowledged message, to be received next or last. This does nothing if the message is no longer in flight, so it is
-- idempotent.
--
-- Uses   messages
-- KEYS   queue, unacknowledged, renewed, deliveries
-- Checks unacknowledged
-- ARGV   receipt, receive_next, counts_delivery

use_reserve('hash', unacknowledged)
local message = redis.call('HGET', unacknowledged, receipt)
redis.call('ZREM', renewed, receipt)
redis.call('HDEL', unacknowledged, receipt)
if not message then return end
redis.call(receive_next and 'RPUSH' or 'LPUSH', queue, message)
if counts_delivery then count_delivery(receipt, message) end
