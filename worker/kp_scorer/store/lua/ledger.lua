-- The transitions of a trace's record, each written once. The scripts of the ledger begin with this.
--
-- A record is a hash: state (pending, decided, dead; none if only its place is known), digest, decision, reason, detail, letter;
-- while it is pending: since_ms, submission, resends, owner of whoever decides it and lease_ms, until when a worker has it in hand,
-- attempts; as_letter, the digest of what its client noted and the id that this has, or would have, as a dead letter; its place in
-- the novelty log: epoch, entry, and the entries given_up.

-- The trace's old place was that of another content: it stays in the log, for the windows of others, and is no longer its own.
local function give_up_place(record)
    local entry, given_up = read(record, 'entry', 'given_up')
    if entry then
        redis.call('HSET', record, 'given_up', (given_up or '') .. ' ' .. entry)
        redis.call('HDEL', record, 'epoch', 'entry')
    end
end

-- A submission is heard of for the first time. Until it has ended, its record does not expire.
local function to_pending(record, trace_id, digest, pending, counts, now)
    local known_digest = redis.call('HGET', record, 'digest')
    if known_digest and known_digest ~= digest then give_up_place(record) end
    redis.call('HDEL', record, 'decision', 'reason', 'detail', 'letter', 'as_letter', 'submission', 'resends', 'owner', 'lease_ms',
        'attempts')
    redis.call('HSET', record, 'state', 'pending', 'digest', digest, 'since_ms', now)
    redis.call('PERSIST', record)
    redis.call('ZADD', pending, now, trace_id)
    redis.call('HINCRBY', counts, 'submitted', 1)
end

-- What a pending trace needs no longer once it has ended.
local function end_pending(record, trace_id, pending)
    redis.call('ZREM', pending, trace_id)
    redis.call('HDEL', record, 'since_ms', 'submission', 'resends', 'owner', 'lease_ms', 'attempts')
end

local function to_decided(record, trace_id, decision, pending, counts, ttl_ms)
    end_pending(record, trace_id, pending)
    redis.call('HSET', record, 'state', 'decided', 'decision', decision)
    redis.call('PEXPIRE', record, ttl_ms)
    redis.call('HINCRBY', counts, 'decided', 1)
end

local function to_dead(record, trace_id, letter_id, reason, detail, pending, ttl_ms)
    end_pending(record, trace_id, pending)
    redis.call('HSET', record, 'state', 'dead', 'reason', reason, 'detail', detail, 'letter', letter_id)
    redis.call('PEXPIRE', record, ttl_ms)
end

-- No record is dead of what cannot be read by its name.
local function forget_dead(record, letter_id)
    local state, record_letter = read(record, 'state', 'letter')
    if state == 'dead' and record_letter == letter_id then redis.call('DEL', record) end
end

-- A dead letter goes for good, and the record that died by it. `sizes` holds the bytes of each letter by its id, and those of all
-- in `total`.
local function remove_letter(letters, sizes, letter, letter_id, record_prefix)
    local trace_id = redis.call('HGET', letter, 'trace_id')
    if trace_id and trace_id ~= '' then forget_dead(record_prefix .. trace_id, letter_id) end
    redis.call('ZREM', letters, letter_id)
    redis.call('HINCRBY', sizes, 'total', 0 - (redis.call('HGET', sizes, letter_id) or 0))
    redis.call('HDEL', sizes, letter_id)
    return redis.call('DEL', letter)
end

-- The dead letter that is to go next, and whether its time is over: the oldest, if that is so, or if there are too many or too
-- large ones. The only one stays whatever its size, as its message is about to be acknowledged.
local function next_to_go(letters, sizes, most, most_bytes, expired_ms)
    local letter_id, last_ms = unpack(redis.call('ZRANGE', letters, 0, 0, 'WITHSCORES'))
    if not letter_id then return nil end
    if tonumber(last_ms) <= expired_ms then return letter_id, true end
    local count, bytes = redis.call('ZCARD', letters), tonumber(redis.call('HGET', sizes, 'total') or 0)
    if count > 1 and (count > most or bytes > most_bytes) then return letter_id, false end
    return nil
end

