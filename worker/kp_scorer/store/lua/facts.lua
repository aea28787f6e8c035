-- The facts that decisions leave for the gates of all workers, in the streams `facts` and `kept_facts`. The scripts that use this
-- text define both, and their bounds. Gates apply the entries in their order.
--
-- An entry has `i`, the id of its trace, and
--   d, f      the fact of a decision, after the domain of the trace
--   d, f, r   the fact at the place `r` once more: its trace is kept from here on
--   r         a note that the trace of the fact at this place is no longer kept
-- or `e`, the place of an entry that was erased, which `erase_entries` notes.

-- Append an entry to `facts`, and return its place. Append it to `kept_facts` under the same id if its trace is kept: it stays there
-- for longer.
local has_stored_facts = false
local function store_fact(is_of_kept, ...)
    has_stored_facts = true
    local place = redis.call('XADD', facts, 'MAXLEN', most_facts, '*', ...)
    if is_of_kept then redis.call('XADD', kept_facts, 'MAXLEN', kept_elements, place, ...) end
    return place
end

-- If this call has stored facts, drop kept traces that have expired, and let both streams expire when no entry counts any more.
local function expire_facts()
    if not has_stored_facts then return end
    redis.call('PEXPIRE', kept_facts, kept_ttl_ms)
    redis.call('PEXPIRE', facts, kept_ttl_ms)
    redis.call('XTRIM', kept_facts, 'MINID', string.format('%.0f', math.max(0, now - kept_ttl_ms)))
end
