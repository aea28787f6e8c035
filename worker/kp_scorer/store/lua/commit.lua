-- Store decisions; the first end of a trace stands. What is stored is counted.
--
-- KEYS  index of pending, counts, tallies, then a record for each trace
-- ARGV  ttl of a record in ms, then for each trace its id, its digest, the decision, the entry of the novelty log that the
--       decision rests on (an empty string without an embedder), its domain, 1 if settings name that, what stands for the policies
--       that are compared (an empty string without a shadow), and the outcomes by both: `accepted>rejected`
-- Reply for each trace: `stored`; `stands` and the earlier decision; `dead`, reason and detail; `conflict` if its id was taken by
-- another digest; or `again` if its place has changed and with it what its novelty is
--
-- The tallies are a hash: `decided DOMAIN`, decisions of this domain; `OUTCOME>OUTCOME DOMAIN`, those among them that the policies
-- of `comparison` were compared on, by their outcomes; `names`, how many domains have fields that no settings name. What comes after
-- MOST_NAMES of those has fields with no domain in them.

local pending, counts, tallies = KEYS[1], KEYS[2], KEYS[3]
expect('zset', pending)
expect('hash', counts, tallies)
local record_ttl_ms = ARGV[1]
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 4, 2, 8
local MOST_NAMES = 1000
local now = now_ms()
local compared_by, names = read(tallies, 'comparison', 'names')
names = tonumber(names or 0)

use_reserve(pending)

-- What a domain is counted under.
local function name_of(domain, is_named)
    if is_named or redis.call('HGET', tallies, 'decided ' .. domain) then return domain end
    if names >= MOST_NAMES then return '' end
    names = redis.call('HINCRBY', tallies, 'names', 1)
    return domain
end

-- Outcomes by other policies than before are counted from nothing.
local function compare_by(comparison)
    if comparison == compared_by then return end
    local found = redis.call('HGETALL', tallies)
    for i = 1, #found, 2 do
        if string.find(found[i], '^%a+>') then redis.call('HDEL', tallies, found[i]) end
    end
    redis.call('HSET', tallies, 'comparison', comparison)
    compared_by = comparison
end

local function tally(domain, is_named, comparison, outcomes)
    local name = name_of(domain, is_named)
    redis.call('HINCRBY', tallies, 'decided ' .. name, 1)
    if comparison == '' then return end
    compare_by(comparison)
    redis.call('HINCRBY', tallies, outcomes .. ' ' .. name, 1)
end

local reply = {}
for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
    local trace_id, digest, decision, entry, domain, is_named, comparison, outcomes =
        unpack(ARGV, argument, argument + ARGUMENTS - 1)
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
        tally(domain, is_named == '1', comparison, outcomes)
        reply[#reply + 1] = {'stored'}
    end
end
return reply
