-- The transitions of a trace's record, each written once. The scripts of the ledger begin with this.
--
-- A record is a hash: state (pending, decided, dead; none if only its place is known), digest, decision, reason, detail, letter;
-- while it is pending: since_ms, submission, resends, owner and lease_ms of whoever decides it, attempts; its place in the novelty log:
-- epoch, entry, and the entries given_up.

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
    redis.call('HDEL', record, 'decision', 'reason', 'detail', 'letter', 'submission', 'resends', 'owner', 'lease_ms', 'attempts')
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

