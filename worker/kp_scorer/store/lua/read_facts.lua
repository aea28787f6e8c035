-- Read facts that are newer than a place. Their parts are joined, as one reply for each would take their readers longer than all
-- else that they do with them.
--
-- KEYS   facts
-- ARGV   after, most
-- Reply  (is_there, places, texts, vectors): 1 if the place is still there, or empty; places with a space between them; texts with a
--        line break, of an erased fact its place as JSON; the vectors

local places, texts, vectors = {}, {}, {}
for i, row in ipairs(redis.call('XRANGE', facts, after == '' and '-' or '(' .. after, '+', 'COUNT', most)) do
    local fields = row[2]
    places[i], texts[i] = row[1], fields[4] or ''
    if fields[1] == 'e' then
        texts[i] = cjson.encode(fields[2])
    else
        vectors[#vectors + 1] = fields[6] or ''
    end
end
local is_there = after == '' or #redis.call('XRANGE', facts, after, after) == 1
return {is_there and 1 or 0, table.concat(places, ' '), table.concat(texts, '\n'), table.concat(vectors)}
