-- Dead-letter a submission, and end its trace's record if that is a record of this very submission.
--
-- Uses   ledger
-- KEYS   dead_letters, dead_letter_sizes, dead_junk, dead_rest, pending, counts, record_prefix, dead_letter_prefix
-- ARGV   dead_letter_id, reason, detail, trace_id, digest, deliveries, worker, queued_ms, payload, unreadable,
--        record_ttl_ms, ttl_ms, most, most_bytes
-- Reply  (decision, has_too_many): the decision on this very submission, which then gets no dead letter, or an empty string; 1 if
--        other dead letters have to make room
--
-- trace_id is empty if the submission has no id, digest if the submission could not be decoded. unreadable is the stored decision if
-- the caller cannot read it, otherwise empty. worker and queued_ms are empty if they are unknown.

local record, dead_letter = trace_id ~= '' and record_prefix .. trace_id or nil, dead_letter_prefix .. dead_letter_id
expect('hash', dead_letter)

use_reserve('zset', pending)

local state, known_digest, decision, as_letter
if record then state, known_digest, decision, as_letter = read(record, 'state', 'digest', 'decision', 'as_letter') end
if state == FOREIGN then record, state = nil end
-- Since this caller saw a damaged record, another worker may have decided the trace; that decision stands.
local function is_decision(text)
    local is_json, fields = pcall(cjson.decode, text)
    return is_json and type(fields) == 'table' and fields.trace_id == trace_id and fields.schema_version ~= nil
end
-- A damaged record cannot be trusted; the index tells whether the trace is pending.
local is_damaged = record and reason == 'damaged' and state ~= 'pending' and not (state == 'decided' and is_decision(decision))
if is_damaged then
    redis.call('DEL', record)
    state, known_digest, decision, as_letter = redis.call('ZSCORE', pending, trace_id) and 'pending', nil, nil, nil
end
-- A pending record has a digest. If somebody has removed it, the digest that was noted with the submission replaces it.
if state == 'pending' and as_letter then known_digest = known_digest or string.sub(as_letter, 1, -1 - #dead_letter_id) end
-- A submission that could not be decoded, perhaps only because of this worker's limits, is the same one if its bytes are the same.
local is_same = is_damaged or (digest ~= '' and known_digest == digest) or as_letter == (known_digest or '') .. dead_letter_id
if state == 'decided' and is_same and (decision or '') ~= unreadable then return {decision, 0} end

local is_new = redis.call('HSETNX', dead_letter, 'first_ms', now) == 1
redis.call('HSET', dead_letter, 'last_ms', now, 'reason', reason, 'detail', detail, 'deliveries', deliveries, 'payload', payload)
redis.call('HDEL', dead_letter, 'worker', 'queued_ms')
if worker ~= '' then redis.call('HSET', dead_letter, 'worker', worker) end
if queued_ms ~= '' then redis.call('HSET', dead_letter, 'queued_ms', queued_ms) end
-- Bytes that could not be decoded may come under several trace ids, or none. Until the right one is known, their dead letter has
-- the first id, and does not end the record of another.
local named = redis.call('HGET', dead_letter, 'trace_id') or ''
local is_known = digest ~= '' or is_same
if named == '' or is_known then
    if named ~= '' and named ~= trace_id then forget_dead(record_prefix .. named, dead_letter_id) end
    redis.call('HSET', dead_letter, 'trace_id', trace_id)
elseif named ~= trace_id then
    record, state = nil, nil
end
add(dead_letter, 'burials', 1)
add(counts, reason, 1)
redis.call('PEXPIRE', dead_letter, ttl_ms)
redis.call('ZADD', dead_letters, now, dead_letter_id)
join_kind(dead_letter_id, reason, #payload)

local ends_pending = state == 'pending' and is_same
-- A submission that is dead-lettered again was counted when it was new, and a pending one when it became pending.
if is_new and not ends_pending then add(counts, 'submitted', 1) end
if is_new or ends_pending then add(counts, 'dead', 1) end
-- Leave the record of other content alone.
if record and (not state or state == 'dead' or ends_pending) then
    if known_digest ~= digest and (digest ~= '' or not state) then
        redis.call('HDEL', record, 'digest', 'epoch', 'entry')
        if digest ~= '' then redis.call('HSET', record, 'digest', digest) end
    end
    to_end(record, trace_id, record_ttl_ms, 'dead', 'reason', reason, 'detail', detail, 'letter', dead_letter_id)
end
apply_changes()
return {'', next_to_go() and 1 or 0}
