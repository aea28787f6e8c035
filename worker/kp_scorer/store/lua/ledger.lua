-- The transitions of a trace's record, each defined once. The scripts that change a record use this text, and define the names that
-- it refers to: `pending`, `counts`, the keys of dead letters and their bounds.
--
-- A record is a hash with these fields:
--   state                           pending, decided or dead; none if only the trace's place or its late outcomes are known
--   digest                          of the content
--   since_ms, submission, resends   while pending: its beginning, the bytes that the client noted, the number of resends
--   owner, held_until_ms, attempts  while pending: the worker that holds it, the end of the lease, the workers it may have killed
--   as_letter                       the digest of those bytes, and the id that they have, or would have, as a dead letter
--   decision, label                 the first decision, and the label
--   revised, outcomes               the newest revision, and the ids of late outcomes, each with a space behind it
--   revises                         in the record of a late outcome that waits for its trace: the id of that trace
--   reason, detail, letter          the reason of a dead trace, and the id of the dead letter that it died by
--   epoch, entry                    its place in the novelty log
--   fact                            the place of its newest fact under a gate
--
-- A late outcome has a record of the same form.

-- The changes of `pending` and `counts` that the transitions of this call collect. `apply_changes` makes them at the end of the
-- script, with one command for all traces. Whatever else a script does at its end comes after that, as Redis may refuse it: traces
-- that have ended would stay pending, and a repeated call would not count them.
local made_pending, ended, decided_count = {}, {}, 0

-- Make a submission pending, with these further fields and values. Until it ends, its record does not expire. `known_digest` is the
-- digest in its record, if any. If that differs, the content has no place yet; the old entry stays in the log for other windows.
local function to_pending(record, trace_id, digest, known_digest, ...)
    local place = known_digest == digest and {} or {'epoch', 'entry'}
    redis.call('HDEL', record, 'state', 'since_ms', 'decision', 'reason', 'detail', 'letter', 'as_letter', 'submission', 'resends',
        'owner', 'held_until_ms', 'attempts', 'label', 'revised', 'revises', 'fact', unpack(place))
    redis.call('PERSIST', record)
    redis.call('HSET', record, 'state', 'pending', 'digest', digest, 'since_ms', now, ...)
    made_pending[#made_pending + 1], made_pending[#made_pending + 2] = now, trace_id
end

-- End a submission as decided or dead, with these fields and values; remove the fields that only a pending record needs.
local function to_end(record, trace_id, ttl_ms, state, ...)
    ended[#ended + 1] = trace_id
    if state == 'decided' then decided_count = decided_count + 1 end
    redis.call('HDEL', record, 'since_ms', 'submission', 'resends', 'owner', 'held_until_ms', 'attempts', 'revises')
    redis.call('HSET', record, 'state', state, ...)
    redis.call('PEXPIRE', record, ttl_ms)
end

-- Return the reply for a submission that has ended already, or whose id belongs to another digest; nil for one that may end now.
local function earlier_end(state, known_digest, digest, decision, reason, detail)
    if ((known_digest or state == 'dead') and known_digest ~= digest) or state == FOREIGN then return {'conflict'} end
    if state == 'decided' then return {'stands', decision} end
    if state == 'dead' then return {'dead', '', reason, detail} end
end

local function apply_changes()
    -- A trace that is in the index already has been counted: somebody removed the state from its record.
    if #made_pending > 0 then add(counts, 'submitted', call_with_all('ZADD', pending, made_pending)) end
    call_with_all('ZREM', pending, ended)
    if decided_count > 0 then add(counts, 'decided', decided_count) end
end

-- Delete a record that died by this dead letter.
local function forget_dead(record, dead_letter_id)
    local state, died_by = read(record, 'state', 'letter')
    if state == 'dead' and died_by == dead_letter_id then redis.call('DEL', record) end
end

-- Dead letters are of two kinds: junk, which any producer can make at will, and the rest, which failing traces make. The bounds
-- apply to each kind by itself, so that only junk makes room for junk. `dead_junk` and `dead_rest` list the letters of a kind by
-- time. `dead_letter_sizes` holds the bytes and the kind of each letter, and in its fields `junk` and `rest` the bytes of the kind.
local LETTER_BYTES = 1000
local JUNK = {malformed = true, invalid = true, conflict = true}

local function index_of(kind)
    return kind == 'junk' and dead_junk or dead_rest
end

local function size_of(dead_letter_id)
    return string.match(redis.call('HGET', dead_letter_sizes, dead_letter_id) or '', '^(%d+) (%l+)$')
end

local function leave_kind(dead_letter_id)
    local bytes, kind = size_of(dead_letter_id)
    redis.call('HDEL', dead_letter_sizes, dead_letter_id)
    redis.call('ZREM', dead_junk, dead_letter_id)
    redis.call('ZREM', dead_rest, dead_letter_id)
    if kind and add(dead_letter_sizes, kind, -bytes) <= 0 then redis.call('HDEL', dead_letter_sizes, kind) end
end

local function join_kind(dead_letter_id, reason, payload_bytes)
    leave_kind(dead_letter_id)
    local kind, bytes = JUNK[reason] and 'junk' or 'rest', payload_bytes + LETTER_BYTES
    redis.call('HSET', dead_letter_sizes, dead_letter_id, bytes .. ' ' .. kind)
    add(dead_letter_sizes, kind, bytes)
    redis.call('ZADD', index_of(kind), now, dead_letter_id)
    for _, key in ipairs({dead_letters, dead_letter_sizes, index_of(kind)}) do redis.call('PEXPIRE', key, ttl_ms) end
end

-- Delete a dead letter, and the record of its trace, if that died by it.
local function remove_dead_letter(dead_letter, dead_letter_id, trace_id)
    forget_dead(record_prefix .. trace_id, dead_letter_id)
    leave_kind(dead_letter_id)
    redis.call('ZREM', dead_letters, dead_letter_id)
    return redis.call('DEL', dead_letter)
end

-- Return the dead letter to drop next, and true if its time is not over: the oldest of a kind that exceeds its bounds, or the
-- oldest junk while submissions are refused for lack of memory. The newest letter stays, and its size does not count, because its
-- message is about to be acknowledged. Each kind takes at most an eighth of Redis' memory.
local function next_to_go()
    local oldest, last_ms = unpack(redis.call('ZRANGE', dead_letters, 0, 0, 'WITHSCORES'))
    if not oldest then return nil end
    if tonumber(last_ms) <= now - ttl_ms then return oldest, false end
    local newest = redis.call('ZRANGE', dead_letters, -1, -1)[1]
    local newest_bytes, newest_kind = size_of(newest)
    local used, limit = memory()
    local bound = limit > 0 and math.min(most_bytes, limit / 8) or most_bytes
    for _, kind in ipairs({'junk', 'rest'}) do
        local bytes = number(redis.call('HGET', dead_letter_sizes, kind)) - (kind == newest_kind and newest_bytes or 0)
        local is_over = redis.call('ZCARD', index_of(kind)) > most or bytes > bound
        local first = redis.call('ZRANGE', index_of(kind), 0, 0)[1]
        if first and first ~= newest and (is_over or (kind == 'junk' and is_nearly_full(used, limit))) then return first, true end
    end
    -- Somebody has removed `dead_junk` or `dead_rest`, so that some dead letters are in neither.
    if redis.call('ZCARD', dead_letters) > 2 * most then return oldest, true end
end
