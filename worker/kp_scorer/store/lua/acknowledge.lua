-- Acknowledge messages. This is a script and no transaction, because a full Redis refuses to queue a transaction's commands.
--
-- Uses   messages
-- KEYS   unacknowledged, renewed, deliveries
-- Checks unacknowledged, renewed, deliveries
-- ARGV   receipts...

-- A message that has left `unacknowledged` is acknowledged, even if a later command fails.
call_with_all('HDEL', unacknowledged, receipts)
call_with_all('ZREM', renewed, receipts)
local digests = {}
for _, receipt in ipairs(receipts) do
    local _, digest = redelivery_of(receipt)
    digests[#digests + 1] = digest
end
call_with_all('HDEL', deliveries, digests)
