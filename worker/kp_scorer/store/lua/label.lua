-- Label decided traces `good` or `bad`, replacing earlier labels; leave other traces as they are.
--
-- KEYS   records...
-- ARGV   labels...
-- Reply  the state of each trace, empty if it has none; those that are decided are labelled

local states = {}
for i, record in ipairs(records) do
    local state = read(record, 'state')
    if state == 'decided' then redis.call('HSET', record, 'label', labels[i]) end
    states[i] = state ~= FOREIGN and state or ''
end
return states
