-- Store decisions, and count them in the same step. The first end of a trace stands, so a commit is idempotent.
--
-- Uses   ledger
-- KEYS   pending, counts, tallies, records...
-- ARGV   record_ttl_ms, verdicts... (trace_id, digest, decision, entry, domain, is_known, guards)
-- Reply  (outcome, decision, reason, detail) for each trace; the last three may be missing
--
-- The decision rests on this entry of the novelty log, empty without an embedder. is_known is 1 if settings name the domain. guards
-- are those that fired, with a space between them.
--
-- outcome is `stored`; `stands`, with the earlier decision; `dead`, with reason and detail; `conflict` if the id belongs to another
-- digest; or `again` if the trace's place has changed, and with it its novelty.
--
-- tallies is a hash: `decided DOMAIN` counts the decisions of a domain, `guard NAME` those for which this guard fired, and `names`
-- the domains with a field that no settings name. After MOST_NAMES of those, further domains share the field without a name.

local MOST_NAMES = 1000
local names = number(read(tallies, 'names'))

use_reserve('zset', pending)

-- The amount by which this call increases each tally.
local growth = {}
local function tally(field)
    growth[field] = (growth[field] or 0) + 1
end

-- Return the name that a domain is counted under.
local function name_of(domain, is_known)
    local field = 'decided ' .. domain
    if is_known or growth[field] or redis.call('HGET', tallies, field) then return domain end
    if names >= MOST_NAMES then return '' end
    names = names + 1
    tally('names')
    return domain
end

local reply = {}
for i, record in ipairs(records) do
    local verdict = verdicts[i]
    local trace_id, digest, entry = verdict.trace_id, verdict.digest, verdict.entry
    local state, known_digest, known_decision, reason, detail, known_entry =
        read(record, 'state', 'digest', 'decision', 'reason', 'detail', 'entry')
    if ((known_digest or state == 'dead') and known_digest ~= digest) or state == FOREIGN then
        reply[i] = {'conflict'}
    elseif state == 'decided' then
        reply[i] = {'stands', known_decision}
    elseif state == 'dead' then
        reply[i] = {'dead', '', reason, detail}
    elseif entry ~= '' and known_entry ~= entry then
        reply[i] = {'again'}
    else
        -- The record was forgotten, or Redis came back without it, so this submission has not been counted.
        if state ~= 'pending' then to_pending(record, trace_id, digest, known_digest) end
        to_end(record, trace_id, record_ttl_ms, 'decided', 'decision', verdict.decision)
        tally('decided ' .. name_of(verdict.domain, verdict.is_known))
        for guard in string.gmatch(verdict.guards, '%S+') do tally('guard ' .. guard) end
        reply[i] = {'stored'}
    end
end
for field, by in pairs(growth) do add(tallies, field, by) end
apply_changes()
return reply
