-- Store decisions; the first one of a trace wins.
--
-- KEYS  index of pending, counts, then a record for each trace
-- ARGV  ttl of a record in ms, ttl of what is pending in ms, then for each trace its id, its digest and the decision
-- Reply for each trace: `stored`; or `stands` and the earlier decision; or `conflict` if its id was taken by another digest

local pending, counts = KEYS[1], KEYS[2]
local record_ttl_ms, pending_ttl_ms = ARGV[1], ARGV[2]
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 3, 3, 3

local reply = {}
for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
    local trace_id, digest, decision = ARGV[argument], ARGV[argument + 1], ARGV[argument + 2]
    local state, known_digest, known_decision = unpack(redis.call('HMGET', record, 'state', 'digest', 'decision'))
    if known_digest and known_digest ~= digest then
        reply[#reply + 1] = {'conflict', ''}
    elseif known_decision then
        reply[#reply + 1] = {'stands', known_decision}
    else
        -- Its record expired, or it died as another submission did, so this one has not been counted yet.
        if state ~= 'pending' then redis.call('HINCRBY', counts, 'submitted', 1) end
        redis.call('HINCRBY', counts, 'decided', 1)
        redis.call('PEXPIRE', counts, pending_ttl_ms)
        redis.call('ZREM', pending, trace_id)
        redis.call('HSET', record, 'state', 'decided', 'digest', digest, 'decision', decision)
        redis.call('HDEL', record, 'reason', 'detail', 'attempts', 'resends', 'submission')
        redis.call('PEXPIRE', record, record_ttl_ms)
        reply[#reply + 1] = {'stored', ''}
    end
end
return reply
