-- Note submissions as pending before they are sent, unless they are known.
--
-- KEYS  index of pending, counts, then a record for each trace
-- ARGV  ttl of what is pending in ms, then for each trace its id, its digest and the submission itself
-- Reply for each trace its state, or an empty string if its id was taken by another digest

local pending, counts = KEYS[1], KEYS[2]
local pending_ttl_ms = ARGV[1]
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 3, 2, 3
local now = now_ms()

local reply = {}
for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
    local trace_id, digest, submission = ARGV[argument], ARGV[argument + 1], ARGV[argument + 2]
    local state, known_digest = unpack(redis.call('HMGET', record, 'state', 'digest'))
    if state and state ~= 'dead' and known_digest ~= digest then
        reply[#reply + 1] = ''
    elseif state == 'decided' then
        reply[#reply + 1] = 'decided'
    else
        -- A dead trace submitted again gets another chance, as a new submission, with whatever it says now.
        if state ~= 'pending' then
            redis.call('HINCRBY', counts, 'submitted', 1)
            redis.call('HDEL', record, 'reason', 'detail', 'attempts', 'resends')
        end
        redis.call('HSET', record, 'state', 'pending', 'digest', digest, 'submission', submission)
        redis.call('PEXPIRE', record, pending_ttl_ms)
        redis.call('ZADD', pending, now, trace_id)
        redis.call('PEXPIRE', pending, pending_ttl_ms)
        redis.call('PEXPIRE', counts, pending_ttl_ms)
        reply[#reply + 1] = 'pending'
    end
end
return reply
