-- The transitions of a trace's record, each written once. The scripts that change one use this; `pending`, `counts` and the keys of
-- dead letters are theirs, as is what bounds these.
--
-- A record is a hash: state (pending, decided, dead; none if only its place is known), digest, decision, label, reason, detail, letter;
-- while it is pending: since_ms, submission, resends, owner of whoever decides it and lease_ms, until when a worker holds it,
-- attempts; as_letter, the digest of what its client noted and the id that this has, or would have, as a dead letter; epoch and
-- entry, its place in the novelty log. A field `letter` is the id of the dead letter that the trace died by.

-- Void the place of a trace whose content has changed. The entry stays in the log, for the windows of others.
local function forget_place(record)
    redis.call('HDEL', record, 'epoch', 'entry')
end

-- Make a submission pending. Until it ends, its record does not expire.
local function to_pending(record, trace_id, digest)
    local known_digest = redis.call('HGET', record, 'digest')
    if known_digest and known_digest ~= digest then forget_place(record) end
    redis.call('HDEL', record, 'decision', 'reason', 'detail', 'letter', 'as_letter', 'submission', 'resends', 'owner', 'lease_ms',
        'attempts', 'label')
    redis.call('HSET', record, 'state', 'pending', 'digest', digest, 'since_ms', now)
    redis.call('PERSIST', record)
    -- If it is in the index already, somebody removed the state from its record, and it has been counted.
    add(counts, 'submitted', redis.call('ZADD', pending, now, trace_id))
end

-- End a submission, as decided or dead, with these fields and values; remove those that only a pending one needs.
local function to_end(record, trace_id, ttl_ms, state, ...)
    redis.call('ZREM', pending, trace_id)
    redis.call('HDEL', record, 'since_ms', 'submission', 'resends', 'owner', 'lease_ms', 'attempts')
    redis.call('HSET', record, 'state', state, ...)
    redis.call('PEXPIRE', record, ttl_ms)
end

-- Delete a record that died by this dead letter.
local function forget_dead(record, dead_letter_id)
    local state, died_by = read(record, 'state', 'letter')
    if state == 'dead' and died_by == dead_letter_id then redis.call('DEL', record) end
end

-- Dead letters are in classes, by reason and by the namespace in the trace's id, so that junk makes room for junk. `dead_letter_sizes`
-- holds what each takes and its class, `dead_letter_classes` what those of each take together; a key of the class lists them by time.
local LETTER_BYTES = 1000
local MOST_CLASSES = 100
local JUNK = {malformed = true, invalid = true, conflict = true}

local function size_of(dead_letter_id)
    return string.match(redis.call('HGET', dead_letter_sizes, dead_letter_id) or '', '^(%d+) (.+)$')
end

local function leave_class(dead_letter_id)
    local bytes, class = size_of(dead_letter_id)
    redis.call('HDEL', dead_letter_sizes, dead_letter_id)
    if not class then return end
    redis.call('ZREM', dead_letters .. '_of:' .. class, dead_letter_id)
    local left = number(redis.call('ZSCORE', dead_letter_classes, class)) - bytes
    if left > 0 then redis.call('ZADD', dead_letter_classes, left, class) else redis.call('ZREM', dead_letter_classes, class) end
end

local function join_class(dead_letter_id, reason, trace_id, payload_bytes)
    leave_class(dead_letter_id)
    local namespace = trace_id == '' and ':none' or string.match(trace_id, '^kp:trace:([^:]+):') or ''
    local class, bytes = reason .. ' ' .. namespace, payload_bytes + LETTER_BYTES
    local others = redis.call('ZSCORE', dead_letter_classes, class)
    -- Whoever invents names has a class with all who come too late.
    if not others and redis.call('ZCARD', dead_letter_classes) >= MOST_CLASSES then
        class = reason .. ' :others'
        others = redis.call('ZSCORE', dead_letter_classes, class)
    end
    redis.call('HSET', dead_letter_sizes, dead_letter_id, bytes .. ' ' .. class)
    redis.call('ZADD', dead_letter_classes, number(others) + bytes, class)
    redis.call('ZADD', dead_letters .. '_of:' .. class, now, dead_letter_id)
    for _, key in ipairs({dead_letters, dead_letter_sizes, dead_letter_classes, dead_letters .. '_of:' .. class}) do
        redis.call('PEXPIRE', key, ttl_ms)
    end
end

-- A dead letter goes for good, and the record that died by it.
local function remove_dead_letter(dead_letter, dead_letter_id, record)
    forget_dead(record, dead_letter_id)
    leave_class(dead_letter_id)
    redis.call('ZREM', dead_letters, dead_letter_id)
    return redis.call('DEL', dead_letter)
end

-- The dead letter that is to go next, whether before its time, and of which class. Over the limit on their number, it is the oldest of
-- the largest class of the reason that has most; over the limit on bytes, the same by bytes. Junk also goes while submissions are
-- refused for want of memory. The newest stays, and its size is in nobody's way, as its message is about to be acknowledged. The id
-- is empty if a class has none: an index that somebody has damaged leads nobody round in a circle.
local function next_to_go()
    local oldest, last_ms = unpack(redis.call('ZRANGE', dead_letters, 0, 0, 'WITHSCORES'))
    if not oldest then return nil end
    if tonumber(last_ms) <= now - ttl_ms then return oldest, false end
    local newest_bytes, newest_class = size_of(redis.call('ZRANGE', dead_letters, -1, -1)[1])
    local by_class = redis.call('ZRANGE', dead_letter_classes, 0, -1, 'WITHSCORES')
    local total = -(newest_bytes or 0)
    for i = 2, #by_class, 2 do total = total + by_class[i] end
    local used, limit = memory()
    local is_too_many = redis.call('ZCARD', dead_letters) > most
    local is_too_much = is_too_many or total > (limit > 0 and math.min(most_bytes, limit / 4) or most_bytes)
    if is_too_much and not size_of(oldest) then return oldest, true end
    local of_reasons = {}
    for i = 1, #by_class, 2 do
        local class = by_class[i]
        local weight = is_too_many and redis.call('ZCARD', dead_letters .. '_of:' .. class) or tonumber(by_class[i + 1])
        if class == newest_class then weight = weight - (is_too_many and 1 or newest_bytes) end
        local reason = string.match(class, '^%S+')
        local sum = of_reasons[reason] or {weight = 0, largest_weight = 0}
        if weight > sum.largest_weight then sum.largest, sum.largest_weight = class, weight end
        sum.weight = sum.weight + weight
        of_reasons[reason] = sum
    end
    local chosen, chosen_reason = {weight = 0}, ''
    for reason, sum in pairs(of_reasons) do
        local may_go = is_too_much or (JUNK[reason] and is_nearly_full(used, limit))
        if may_go and (sum.weight > chosen.weight or (sum.weight == chosen.weight and reason > chosen_reason)) then
            chosen, chosen_reason = sum, reason
        end
    end
    if not chosen.largest then return nil end
    return redis.call('ZRANGE', dead_letters .. '_of:' .. chosen.largest, 0, 0)[1] or '', true, chosen.largest
end
