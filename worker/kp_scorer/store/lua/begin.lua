-- Begin to decide traces: read their records, open those that came without, and note who decides them.
--
-- KEYS  index of pending, counts, index of workers, then a record for each trace
-- ARGV  the worker that begins, how long it is taken for alive without another word in ms, how long a dead one is remembered in
--       ms, how long it may take to decide in ms, 1 if it decides the trace alone; then for each trace its id and its digest
-- Reply for each trace: state, digest, decision, reason, detail, attempts that came to no end, 1 if another worker holds it

local pending, counts, workers = KEYS[1], KEYS[2], KEYS[3]
local worker, worker_lease_ms, remembered_ms, lease_ms, alone = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 4, 6, 2
local now = now_ms()
expect('zset', pending, workers)
expect('hash', counts)

local function is_alive(owner)
    local until_ms = redis.call('ZSCORE', workers, owner)
    return until_ms and tonumber(until_ms) > now
end

use_reserve(pending)
redis.call('ZADD', workers, now + worker_lease_ms, worker)
redis.call('PEXPIRE', workers, remembered_ms)

local reply = {}
for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
    local trace_id, digest = ARGV[argument], ARGV[argument + 1]
    local state, known_digest, decision, reason, detail, attempts, owner, held_until_ms =
        read(record, 'state', 'digest', 'decision', 'reason', 'detail', 'attempts', 'owner', 'lease_ms')
    if not state or (state == 'dead' and known_digest ~= digest) then
        to_pending(record, trace_id, digest, pending, counts, now)
        state, known_digest, decision, reason, detail, attempts, owner = 'pending', digest, false, false, false, 0, false
    end
    attempts = tonumber(attempts or 0)
    local is_held = false
    if state == 'pending' and known_digest == digest then
        if owner and owner ~= worker then
            if is_alive(owner) then
                is_held = tonumber(held_until_ms) > now
            else
                -- The trace may be what ended its worker.
                attempts = redis.call('HINCRBY', record, 'attempts', 1)
                redis.call('HDEL', record, 'owner', 'lease_ms')
            end
        end
        if not is_held and (alone or attempts == 0) then
            redis.call('HSET', record, 'owner', worker, 'lease_ms', now + lease_ms)
        end
    end
    reply[#reply + 1] = {state, known_digest or '', decision or '', reason or '', detail or '', attempts, is_held and 1 or 0}
end
return reply
