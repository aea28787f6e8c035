-- Keep a submission as a dead letter and end its trace's record, if that is a record of this very submission.
--
-- KEYS  index of dead letters, their sizes, this letter, index of pending, counts, the trace's record (none if it has none to
--       speak of)
-- ARGV  letter's id, reason, detail, trace id, digest (an empty string if the submission could not be decoded), deliveries, payload,
--       ttl of a record in ms, ttl of a letter in ms, largest number of letters, largest number of bytes of all payloads, prefix of
--       a record's key
-- Reply the decision of this very submission, in place of a letter, if there is one, else an empty string; and 1 if letters are
-- to make room

local letters, sizes, letter, pending, counts, record = unpack(KEYS)
local letter_id, reason, detail, trace_id, digest, deliveries, payload =
    ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local record_ttl_ms, letter_ttl_ms, most, most_bytes = ARGV[8], ARGV[9], tonumber(ARGV[10]), tonumber(ARGV[11])
local record_prefix = ARGV[12]
local now = now_ms()
expect('zset', letters, pending)
expect('hash', sizes, letter, counts, record)

use_reserve(pending)

local state, known_digest, decision, as_letter, submission
if record then
    state, known_digest, decision, as_letter, submission = read(record, 'state', 'digest', 'decision', 'as_letter', 'submission')
end
-- What could not be decoded is the same if its bytes are, also where the limits of one worker alone keep it from that. Clients of
-- version 0.1.0 note no `as_letter`.
local is_same = (digest ~= '' and known_digest == digest) or as_letter == (known_digest or '') .. letter_id or submission == payload
if state == 'decided' and is_same then return {decision, 0} end

local is_new = redis.call('HSETNX', letter, 'first_ms', now) == 1
redis.call('HSET', letter, 'last_ms', now, 'reason', reason, 'detail', detail, 'deliveries', deliveries, 'payload', payload)
-- Bytes that could not be decoded may come under several names, or none. Their letter has the first, and speaks for no other's
-- record, until it is known whose they are.
local named = redis.call('HGET', letter, 'trace_id') or ''
local is_known = digest ~= '' or is_same
if named == '' or is_known then
    if named ~= '' and named ~= trace_id then forget_dead(record_prefix .. named, letter_id) end
    redis.call('HSET', letter, 'trace_id', trace_id)
elseif named ~= trace_id then
    record, state = nil, nil
end
redis.call('HINCRBY', letter, 'burials', 1)
redis.call('PEXPIRE', letter, letter_ttl_ms)
redis.call('ZADD', letters, now, letter_id)
if redis.call('HSETNX', sizes, letter_id, #payload) == 1 then redis.call('HINCRBY', sizes, 'total', #payload) end
redis.call('PEXPIRE', letters, letter_ttl_ms)
redis.call('PEXPIRE', sizes, letter_ttl_ms)

local ends_pending = state == 'pending' and is_same
-- A letter buried again was counted when it was new; a pending submission was counted when it became so.
if is_new and not ends_pending then redis.call('HINCRBY', counts, 'submitted', 1) end
if is_new or ends_pending then redis.call('HINCRBY', counts, 'dead', 1) end
-- Another content's record is none of this submission's business.
if record and (not state or state == 'dead' or ends_pending) then
    if known_digest ~= digest and (digest ~= '' or not state) then
        give_up_place(record)
        redis.call('HDEL', record, 'digest')
        if digest ~= '' then redis.call('HSET', record, 'digest', digest) end
    end
    to_dead(record, trace_id, letter_id, reason, detail, pending, record_ttl_ms)
end
return {'', next_to_go(letters, sizes, most, most_bytes, now - letter_ttl_ms) and 1 or 0}
