-- Store decisions; the first end of a trace stands.
--
-- KEYS  index of pending, counts, then a record for each trace
-- ARGV  ttl of a record in ms, then for each trace its id, its digest, the decision, and the entry of the novelty log that the
--       decision rests on (an empty string without an embedder)
-- Reply for each trace: `stored`; `stands` and the earlier decision; `dead`, reason and detail; `conflict` if its id was taken by
-- another digest; or `again` if its place has changed and with it what its novelty is

local pending, counts = KEYS[1], KEYS[2]
expect('zset', pending)
expect('hash', counts)
local record_ttl_ms = ARGV[1]
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 3, 2, 4
local now = now_ms()

use_reserve(pending)

local reply = {}
for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
    local trace_id, digest, decision, entry = ARGV[argument], ARGV[argument + 1], ARGV[argument + 2], ARGV[argument + 3]
    local state, known_digest, known_decision, reason, detail, known_entry =
        read(record, 'state', 'digest', 'decision', 'reason', 'detail', 'entry')
    if (known_digest or state == 'dead') and known_digest ~= digest then
        reply[#reply + 1] = {'conflict'}
    elseif state == 'decided' then
        reply[#reply + 1] = {'stands', known_decision}
    elseif state == 'dead' then
        reply[#reply + 1] = {'dead', reason, detail}
    elseif entry ~= '' and known_entry ~= entry then
        reply[#reply + 1] = {'again'}
    else
        -- Its record was forgotten, or Redis came back without it, so this submission has not been counted.
        if state ~= 'pending' then to_pending(record, trace_id, digest, pending, counts, now) end
        to_decided(record, trace_id, decision, pending, counts, record_ttl_ms)
        reply[#reply + 1] = {'stored'}
    end
end
return reply
