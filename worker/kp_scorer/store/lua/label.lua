-- Label decided traces `good` or `bad`, also those that have a label; leave others as they are.
--
-- KEYS   records...
-- ARGV   labels...
-- Reply  the state of each trace, empty if there is none: those that are decided are labelled

local states = {}
for i, record in ipairs(records) do
    local state = read(record, 'state')
    if state == 'decided' then redis.call('HSET', record, 'label', labels[i]) end
    states[i] = state ~= FOREIGN and state or ''
end
return states
