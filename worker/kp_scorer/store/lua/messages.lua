-- The steps that receiving, requeueing and reclaiming have in common.

local OVERSIZED_MOST, OVERSIZED_BYTES = 100, 64 * 1024 * 1024
local DELIVERIES_TTL_S = 86400

-- A receipt is the name of one delivery. The receipt of a redelivery ends with the delivery's number and the digest of the message,
-- so that only messages that come back are ever hashed.
local function redelivery_of(receipt)
    return string.match(receipt, ':(%d+):(%x+)$')
end

-- Note that a delivery has failed, after it has left the messages in flight. Copies of a message, which fail as one, count once.
local function count_delivery(receipt, message)
    local delivery, digest = redelivery_of(receipt)
    digest = digest or redis.sha1hex(message)
    local most = math.max(number(redis.call('HGET', deliveries, digest)), number(delivery or 1))
    redis.call('HSET', deliveries, digest, most)
    redis.call('EXPIRE', deliveries, DELIVERIES_TTL_S)
end

-- Keep a message that is too large for a worker to read, and drop older ones beyond the bounds. The newest stays, however large:
-- its beginning is about to become a dead letter, and only this list has the rest.
local function keep_oversized(message)
    call('RPUSH', oversized, message)
    redis.call('EXPIRE', oversized, oversized_ttl_s)
    local _, limit = memory()
    local most_bytes = limit > 0 and math.min(OVERSIZED_BYTES, limit / 4) or OVERSIZED_BYTES
    local kept, bytes = 1, #message
    while kept < OVERSIZED_MOST do
        local older = redis.call('LINDEX', oversized, -kept - 1)
        if not older then return end
        bytes = bytes + #older
        if bytes > most_bytes then break end
        kept = kept + 1
    end
    redis.call('LTRIM', oversized, -kept, -1)
end

-- Return the message to deliver: only the beginning of a message that is too large, as the whole could end every worker.
local function cut(message)
    if #message <= largest_bytes then return message end
    keep_oversized(message)
    return cut_mark .. string.sub(message, 1, beginning_bytes)
end

-- Return messages from `moving` to the queue. Their consumers are about to receive them, or are dead. Returning them is right in both
-- cases: a consumer that lives receives what is next. Of a message that is too large only the beginning returns, which cannot kill a
-- consumer.
local function return_moved()
    local moved = call('LRANGE', moving, -most, -1)
    if #moved == 0 then return end
    use_reserve('list', moving)
    for _, message in ipairs(moved) do redis.call('RPUSH', queue, cut(message)) end
    redis.call('LTRIM', moving, 0, -#moved - 1)
end
