-- Begin to decide traces: read their records, open those that came without, and count the attempt.
--
-- KEYS  index of pending, counts, then a record for each trace
-- ARGV  ttl of what is pending in ms; 1 to count an attempt that is not the first; then for each trace its id and its digest
-- Reply for each trace: state, digest, decision, reason, detail, attempts before this one

local pending, counts = KEYS[1], KEYS[2]
local pending_ttl_ms, count_all = ARGV[1], ARGV[2] == '1'
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 3, 3, 2
local now = now_ms()

local reply = {}
for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
    local trace_id, digest = ARGV[argument], ARGV[argument + 1]
    local state, known_digest, decision, reason, detail, attempts =
        unpack(redis.call('HMGET', record, 'state', 'digest', 'decision', 'reason', 'detail', 'attempts'))
    attempts = tonumber(attempts or 0)
    if not state or (state == 'dead' and known_digest ~= digest) then
        redis.call('HINCRBY', counts, 'submitted', 1)
        redis.call('HDEL', record, 'reason', 'detail', 'attempts', 'resends', 'submission')
        redis.call('HSET', record, 'state', 'pending', 'digest', digest)
        redis.call('PEXPIRE', record, pending_ttl_ms)
        redis.call('ZADD', pending, now, trace_id)
        redis.call('PEXPIRE', pending, pending_ttl_ms)
        redis.call('PEXPIRE', counts, pending_ttl_ms)
        state, known_digest, decision, reason, detail, attempts = 'pending', digest, false, false, false, 0
    end
    if state == 'pending' and known_digest == digest and (attempts == 0 or count_all) then
        redis.call('HSET', record, 'attempts', attempts + 1)
    end
    reply[#reply + 1] = {state, known_digest or '', decision or '', reason or '', detail or '', attempts}
end
return reply
