-- Let go of traces whose deciding ended in good order, if not in a decision, so that whoever meets them next need not wait.
--
-- KEYS  a record for each trace
-- ARGV  the worker that held them

local worker = ARGV[1]

for _, record in ipairs(KEYS) do
    if redis.call('HGET', record, 'owner') == worker then redis.call('HDEL', record, 'owner', 'lease_ms') end
end
