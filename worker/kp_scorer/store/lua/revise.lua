-- Store revisions, each once, and only if it supersedes the newest decision on its trace. A late outcome whose trace is undecided
-- waits for it. The first end of a late outcome stands, so this is idempotent.
--
-- Uses   ledger, facts
-- KEYS   pending, counts, tallies, runs, record_prefix, run_prefix, facts, kept_facts
-- ARGV   record_ttl_ms, kept_elements, kept_ttl_ms, most_facts, most_runs,
--        revisions... (outcome_id, digest, trace_id, submission, supersedes, decision, outcome, change)
-- Reply  (outcome, decision, reason, detail) for each, as `commit` replies; or `waits`, or `too_many`
--
-- A late outcome has a record like that of a trace, with the revision as its decision. supersedes is the time of the decision that
-- was judged again; it is empty, as is the revision, if there was none. If the trace has a newer decision by now, the reply is `again`.
-- change is `kept` or `dropped` if the revision changes the state of the trace under a gate, otherwise empty.

local MOST_BYTES = 4000

use_reserve('zset', pending)

-- Return the time when a decision was made. A revision also contains the time of the decision before.
local function time_of(decision)
    local is_json, fields = pcall(cjson.decode, decision)
    return is_json and type(fields) == 'table' and fields.decided_at
end

-- List a late outcome in its trace's record, for `commit` and for those who erase the trace. Return false if there are too many.
local function list(of_trace, listed, outcome_id)
    if string.find(listed, outcome_id .. ' ', 1, true) then return true end
    if #listed > MOST_BYTES then return false end
    redis.call('HSET', of_trace, 'outcomes', listed .. outcome_id .. ' ')
    return true
end

-- Have a run of spans that waits for its outcome submitted now, unless spans have come since it began to wait.
local function wake(run_id)
    local run, due_ms = run_prefix .. run_id, redis.pcall('ZSCORE', runs, run_id)
    local until_ms = read(run, ':until_ms')
    -- Most traces do not come from such a run, and another application may use these keys.
    if type(due_ms) ~= 'string' or until_ms == FOREIGN then return end
    redis.call('HSET', run, ':outcome', 1)
    if number(until_ms) == number(due_ms) then redis.call('ZADD', runs, now, run_id) end
end

-- Note for gates that a trace is kept from now on, or no longer, unless its fact is gone. The fact stays where it is, so that a
-- starting worker sees everything that a running one has seen.
local function note(of_trace, trace_id, change)
    local place = read(of_trace, 'fact')
    -- Anyone with write access to Redis can store garbage in place of an id.
    local function look(stream) return place and redis.pcall('XRANGE', stream, place, place)[1] end
    local entry = look(kept_facts) or (change == 'kept' and look(facts)) or {'', {}}
    local _, owner, _, domain, _, fact = unpack(entry[2], 1, 6)
    if owner ~= trace_id then return end
    if change == 'dropped' then
        store_fact(true, 'i', trace_id, 'r', place)
    elseif fact then
        redis.call('HSET', of_trace, 'fact', store_fact(true, 'i', trace_id, 'd', domain, 'f', fact, 'r', place))
    end
end

expect('stream', facts)
expect('stream', kept_facts)

local reply = {}
for i, revision in ipairs(revisions) do
    local outcome_id, digest = revision.outcome_id, revision.digest
    local record, of_trace = record_prefix .. outcome_id, record_prefix .. revision.trace_id
    local state, known_digest, known, reason, detail = read(record, 'state', 'digest', 'decision', 'reason', 'detail')
    local trace_state, first, revised, listed = read(of_trace, 'state', 'decision', 'revised', 'outcomes')
    local is_decided = trace_state == 'decided'
    local is_newest = is_decided and time_of(revised or first) == revision.supersedes
    local ended_before = earlier_end(state, known_digest, digest, known, reason, detail)
    if ended_before then
        reply[i] = ended_before
    elseif is_decided ~= (revision.decision ~= '') or is_decided ~= is_newest or trace_state == FOREIGN then
        reply[i] = {'again'}
    elseif not list(of_trace, listed or '', outcome_id) then
        reply[i] = {'too_many'}
    else
        if state ~= 'pending' then to_pending(record, outcome_id, digest, known_digest) end
        if is_decided then
            redis.call('HSET', of_trace, 'revised', revision.decision)
            redis.call('PEXPIRE', of_trace, record_ttl_ms)
            to_end(record, outcome_id, record_ttl_ms, 'decided', 'decision', revision.decision)
            add(tallies, 'revised ' .. revision.outcome, 1)
            if revision.change ~= '' then note(of_trace, revision.trace_id, revision.change) end
            reply[i] = {'stored'}
        else
            redis.call('HDEL', record, 'owner', 'held_until_ms')
            redis.call('HSET', record, 'submission', revision.submission, 'revises', revision.trace_id)
            if not trace_state then redis.call('PEXPIRE', of_trace, record_ttl_ms) end
            wake(string.match(revision.trace_id, '[^:]*$'))
            reply[i] = {'waits'}
        end
    end
end
apply_changes()
expire_facts()
return reply
