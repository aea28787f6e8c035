-- Let go of traces whose deciding ended in good order, if not in a decision, so that whoever meets them next need not wait.
--
-- KEYS  index of pending, then a record for each trace
-- ARGV  the worker that held them

local pending = KEYS[1]
local worker = ARGV[1]
local FIRST_KEY = 2

for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    if redis.call('HGET', record, 'owner') == worker then redis.call('HDEL', record, 'owner', 'lease_ms') end
end
