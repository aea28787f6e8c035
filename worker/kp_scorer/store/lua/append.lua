-- Append traces to a novelty log, in order, once each, and read the entries that are newer than a mirror's cursor.
--
-- This is idempotent: a trace that is appended again gets its first place back. It is a script and no transaction, because a full
-- Redis refuses to queue a transaction's commands.
--
-- KEYS   log, head, erasures, record_prefix
-- Checks head, erasures
-- ARGV   new_epoch, window, record_ttl_ms, last_entry, last_erasure, most,
--        candidates... (trace_id, digest, vector, is_comparable, visible)
-- Reply  (other_window, places, epoch, last_trace_id, has_last_erasure, entries, erasures)
--
-- If the log is new, new_epoch becomes its epoch. last_entry and last_erasure are the newest ones that the mirror has read, or empty.
-- At most `most` entries and `most` erasures are read.
--
-- If the log was begun with another window, other_window is that window, and the rest of the reply is empty. A place is an entry id,
-- or empty if the trace's id belongs to another digest. last_trace_id is the trace id of last_entry, empty if the log has lost it.

local max_elements, ttl_ms, slack_elements, slack_ms = string.match(window, '^(%d+) (%d+) (%d+) (%d+)')

local epoch, head_time, head_place, head_window = unpack(call('HMGET', head, 'epoch', 'time_ms', 'place', 'window'))
-- Workers with different windows would disagree on novelty, and each would trim entries that the other's window needs.
if head_window and head_window ~= window and redis.call('XLEN', log) > 0 then return {head_window, {}, '', '', 0, {}, {}} end

-- The log's time never goes back, even if the server's clock does, so that entry ids always grow.
local time, place = math.max(now, number(head_time)), number(head_place)

-- A trace keeps its place only while the log and every mirror are sure to hold its whole window, even after all the candidates of
-- this call have been appended.
local newest_place = place + #candidates
local function is_within_slack(entry)
    local entry_time, entry_place = string.match(entry, '^(%d+)-(%d+)$')
    return number(entry_place) > newest_place - slack_elements and number(entry_time) > time - slack_ms
end

-- The record may name an entry that the log does not have.
local function is_in_log(entry, candidate)
    local stored = redis.call('XRANGE', log, entry, entry)[1]
    return stored and stored[2][2] == candidate.trace_id and stored[2][4] == candidate.digest
end

local function admit(candidate)
    local record, digest = record_prefix .. candidate.trace_id, candidate.digest
    local state, known_digest, entry_epoch, entry = read(record, 'state', 'digest', 'epoch', 'entry')
    -- A dead record without a digest belongs to another submission, which could not be decoded.
    if ((known_digest or state == 'dead') and known_digest ~= digest) or state == FOREIGN then return '' end
    if entry and entry_epoch == epoch and is_within_slack(entry) and is_in_log(entry, candidate) then return entry end
    place = place + 1
    local new_entry = string.format('%.0f-%.0f', time, place)
    local more = candidate.is_comparable and {} or {'c', '0'}
    if candidate.visible ~= '' and candidate.visible ~= digest then
        more[#more + 1] = 'vd'
        more[#more + 1] = candidate.visible
    end
    -- A trace that has ended keeps the place that its decision rests on. This worker comes too late, so it only compares.
    if state ~= 'decided' and state ~= 'dead' then
        -- The state is left out: if Redis came back without the record, the ledger has to make and count it at the next `acquire`.
        redis.call('HSET', record, 'digest', digest, 'epoch', epoch, 'entry', new_entry)
        -- A pending record does not expire.
        if not state then redis.call('PEXPIRE', record, record_ttl_ms) end
    end
    -- The entry comes last: if Redis refuses one of the others, for lack of a permission, the next call uses this place again.
    redis.call('XADD', log, new_entry, 'i', candidate.trace_id, 'd', digest, 'v', candidate.vector, unpack(more))
    return new_entry
end

local places = {}
if #candidates > 0 then
    -- Append even if Redis is full, because a place leads to a decision, which frees memory.
    use_reserve('stream', erasures)
    epoch = epoch or new_epoch
    local known_place = place
    for i, candidate in ipairs(candidates) do places[i] = admit(candidate) end
    if place > known_place then
        redis.call('HSET', head, 'epoch', epoch, 'time_ms', string.format('%.0f', time), 'place', string.format('%.0f', place),
            'window', window)
        redis.call('XTRIM', log, 'MAXLEN', '~', max_elements + slack_elements)
        redis.call('XTRIM', log, 'MINID', '~', string.format('%.0f', math.max(0, time - ttl_ms - slack_ms)))
        redis.call('PEXPIRE', log, string.format('%.0f', ttl_ms + slack_ms))
        -- The head must outlive the log: a log that began again at place 1 would assign places twice.
        redis.call('PEXPIRE', head, string.format('%.0f', ttl_ms + slack_ms + 60000))
    end
end

-- Return the entries after the last entry that was read, and that entry first if it is still there.
local function after(stream, last)
    local entries = call('XRANGE', stream, last == '' and '-' or last, '+', 'COUNT', most + 1)
    local first = entries[1] and entries[1][1] == last and table.remove(entries, 1)
    entries[most + 1] = nil
    return entries, first
end

local entries, last = after(log, last_entry)
local erased, erasure = after(erasures, last_erasure)
local has_last_erasure = last_erasure == '' or erasure
return {'', places, epoch or '', last and last[2][2] or '', has_last_erasure and 1 or 0, entries, erased}
