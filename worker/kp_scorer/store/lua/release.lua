-- Let go of traces whose deciding ended in good order, if not in a decision, so that whoever meets them next need not wait. That a
-- worker had them in hand is remembered: what waits there for a store that refuses it is not lost.
--
-- KEYS  a record for each trace
-- ARGV  the worker that held them

local worker = ARGV[1]
local now = now_ms()

for _, record in ipairs(KEYS) do
    if redis.call('HGET', record, 'owner') == worker then
        redis.call('HDEL', record, 'owner')
        redis.call('HSET', record, 'lease_ms', now)
    end
end
