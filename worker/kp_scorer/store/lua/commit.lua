-- Store decisions, and count them in the same step. The first end of a trace stands, so a commit is idempotent.
--
-- Uses   ledger, facts
-- KEYS   pending, counts, tallies, copies, record_prefix, facts, kept_facts
-- Checks pending, tallies
-- ARGV   record_ttl_ms, kept_elements, kept_ttl_ms, most_facts, most_runs,
--        verdicts... (trace_id, digest, decision, entry, domain, is_known, guards, fact, is_kept, trace)
-- Reply  (outcome, decision, reason, detail) for each trace; the last three may be missing
--
-- entry is the entry of the novelty log that the decision rests on, empty without an embedder. is_known is 1 if settings name the
-- domain. guards are the guards that fired, with a space between them.
--
-- outcome is `stored`; `stands`, with the earlier decision; `dead`, with reason and detail; `conflict` if the id belongs to another
-- digest; or `again` if the trace's place has changed, and with it its novelty, or if it rests on a fact that is not stored.
--
-- fact is the fact that the decision leaves for later ones under a gate, and empty without one. Decisions that are stored together
-- rest on each other's facts, in order.
--
-- trace is a copy for a process that warms the log of other settings, or empty. The stream `copies` exists while that process reads.
--
-- tallies is a hash: `decided DOMAIN` counts the decisions of a domain, `guard NAME` the decisions for which this guard fired, and
-- `names` the domains that have a field although no settings name them. After MOST_NAMES such domains, further ones share a field
-- with an empty name.

local MOST_NAMES = 1000
local MOST_COPIED_BYTES = 64 * 2 ^ 20

-- The tallies that this call may increase, with their values before it.
local fields, tallied = {'names', 'decided '}, {}
for _, verdict in ipairs(verdicts) do
    fields[#fields + 1] = 'decided ' .. verdict.domain
    for guard in string.gmatch(verdict.guards, '%S+') do fields[#fields + 1] = 'guard ' .. guard end
end
for i, count in ipairs(call('HMGET', tallies, unpack(fields))) do tallied[fields[i]] = count end
local names = number(tallied.names)

use_reserve('zset', pending)

-- The amount by which this call increases each tally.
local growth = {}
local function tally(field)
    growth[field] = (growth[field] or 0) + 1
end

-- Return the name that a domain is counted under.
local function name_of(domain, is_known)
    local field = 'decided ' .. domain
    if is_known or growth[field] or tallied[field] then return domain end
    if names >= MOST_NAMES then return '' end
    names = names + 1
    tally('names')
    return domain
end

-- Copy a trace while somebody reads the copies. A failure must not leave the decision half stored.
local has_copied = false
local function copy(stored)
    local added = redis.pcall('XADD', copies, 'NOMKSTREAM', '*', 'i', stored.trace_id, 't', stored.trace)
    has_copied = has_copied or (added and not added.err)
end

if #verdicts > 0 and verdicts[1].fact ~= '' then
    expect('stream', facts)
    expect('stream', kept_facts)
end

local reply, lacks_fact = {}, false
for i, verdict in ipairs(verdicts) do
    local record = record_prefix .. verdict.trace_id
    local trace_id, digest, entry = verdict.trace_id, verdict.digest, verdict.entry
    local state, known_digest, known_decision, reason, detail, known_entry, outcomes =
        read(record, 'state', 'digest', 'decision', 'reason', 'detail', 'entry', 'outcomes')
    local ended_before = earlier_end(state, known_digest, digest, known_decision, reason, detail)
    if ended_before then
        reply[i] = ended_before
    elseif (entry ~= '' and known_entry ~= entry) or lacks_fact then
        reply[i] = {'again'}
    else
        -- The record was forgotten, or Redis came back without it, so the counts lack this submission.
        if state ~= 'pending' then to_pending(record, trace_id, digest, known_digest) end
        local ended_as = {'decision', verdict.decision}
        if verdict.fact ~= '' then
            ended_as[3] = 'fact'
            ended_as[4] = store_fact(verdict.is_kept, 'i', trace_id, 'd', verdict.domain, 'f', verdict.fact)
        end
        to_end(record, trace_id, record_ttl_ms, 'decided', unpack(ended_as))
        tally('decided ' .. name_of(verdict.domain, verdict.is_known))
        for guard in string.gmatch(verdict.guards, '%S+') do tally('guard ' .. guard) end
        if verdict.trace ~= '' then copy(verdict) end
        -- Late outcomes that wait for this decision are due at once.
        for outcome_id in string.gmatch(outcomes or '', '%S+') do redis.call('ZADD', pending, 'XX', 0, outcome_id) end
        reply[i] = {'stored'}
    end
    lacks_fact = lacks_fact or (verdict.fact ~= '' and reply[i][1] ~= 'stored')
end
apply_changes()
expire_facts()
-- Leaving out a copy would make a gap in the other log. So all copies are deleted before they take too much memory, which their
-- reader notices.
if has_copied and (bytes_of(copies) > MOST_COPIED_BYTES or is_nearly_full(memory())) then redis.call('DEL', copies) end
local grown = {}
for field, by in pairs(growth) do
    grown[#grown + 1], grown[#grown + 2] = field, string.format('%.0f', number(tallied[field]) + by)
end
call_with_all('HSET', tallies, grown)
return reply
