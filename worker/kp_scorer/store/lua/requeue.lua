-- Requeue an unacknowledged message, to be received next or last. This does nothing if the message is no longer in flight, so it is
-- idempotent.
--
-- Uses   messages
-- KEYS   queue, unacknowledged, renewed, deliveries
-- Checks unacknowledged
-- ARGV   receipt, receive_next, counts_delivery

use_reserve('hash', unacknowledged)
use_reserve('zset', renewed)
local message = redis.call('HGET', unacknowledged, receipt)
-- Redis may refuse to put it back, so it leaves those in flight only then. The calls above show that Redis does not refuse that.
if message then redis.call(receive_next and 'RPUSH' or 'LPUSH', queue, message) end
redis.call('ZREM', renewed, receipt)
redis.call('HDEL', unacknowledged, receipt)
if message and counts_delivery then count_delivery(receipt, message) end
