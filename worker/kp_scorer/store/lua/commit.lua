-- Store decisions; the first end of a trace stands. What is stored is counted.
--
-- KEYS  index of pending, counts, tallies, what is counted of the policies that are compared, then a record for each trace
-- ARGV  ttl of a record in ms, ttl of what is counted of these policies in ms, then for each trace its id, its digest, the
--       decision, the entry of the novelty log that the decision rests on (an empty string without an embedder), its domain, 1 if
--       settings name that, and the outcomes by both policies: `accepted>rejected` (an empty string without a shadow)
-- Reply for each trace: `stored`; `stands` and the earlier decision; `dead`, reason and detail; `conflict` if its id was taken by
-- another digest; or `again` if its place has changed and with it what its novelty is
--
-- The tallies are a hash: `decided DOMAIN`, decisions of this domain; `names`, how many domains have fields that no settings name.
-- What comes after MOST_NAMES of those has fields with no domain in them. What is counted of two policies is a hash of its own, so
-- that workers with other settings leave it alone: `OUTCOME>OUTCOME DOMAIN`, the decisions that they were compared on.

local pending, counts, tallies, compared = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
expect('zset', pending)
expect('hash', counts, tallies, compared)
local record_ttl_ms, compared_ttl_ms = ARGV[1], ARGV[2]
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 5, 3, 7
local MOST_NAMES = 1000
local now = now_ms()
local names = tonumber(read(tallies, 'names') or 0)

use_reserve(pending)

-- What a domain is counted under.
local function name_of(domain, is_named)
    if is_named or redis.call('HGET', tallies, 'decided ' .. domain) then return domain end
    if names >= MOST_NAMES then return '' end
    names = redis.call('HINCRBY', tallies, 'names', 1)
    return domain
end

local function tally(domain, is_named, outcomes)
    local name = name_of(domain, is_named)
    redis.call('HINCRBY', tallies, 'decided ' .. name, 1)
    if outcomes == '' then return end
    redis.call('HINCRBY', compared, outcomes .. ' ' .. name, 1)
    redis.call('PEXPIRE', compared, compared_ttl_ms)
end

local reply = {}
for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
    local trace_id, digest, decision, entry, domain, is_named, outcomes = unpack(ARGV, argument, argument + ARGUMENTS - 1)
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
        tally(domain, is_named == '1', outcomes)
        reply[#reply + 1] = {'stored'}
    end
end
return reply
