-- Label decided traces `good` or `bad`, replacing earlier labels; leave other traces as they are.
--
-- KEYS   record_prefix
-- ARGV   labels... (trace_id, label)
-- Reply  the state of each trace, empty if it has no record; decided traces are labelled

local states = {}
for i, labelled in ipairs(labels) do
    local record = record_prefix .. labelled.trace_id
    local state = read(record, 'state')
    if state == 'decided' then redis.call('HSET', record, 'label', labelled.label) end
    states[i] = state ~= FOREIGN and state or ''
end
return states
