-- Note submissions as pending before they are sent, unless they are known.
--
-- KEYS  index of pending, counts, then a record for each trace
-- ARGV  for each trace its id, its digest, the submission itself, and its id as a dead letter
-- Reply for each trace its state, or an empty string if its id was taken by another digest; nothing at all if Redis is nearly full

local pending, counts = KEYS[1], KEYS[2]
expect('zset', pending)
expect('hash', counts)
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 3, 1, 4
local NEARLY_FULL = 0.9
local now = now_ms()

-- What is left is for what workers do: it is they who free memory.
local memory = redis.call('INFO', 'memory')
local limit = tonumber(string.match(memory, '\nmaxmemory:(%d+)'))
if limit > 0 and tonumber(string.match(memory, '\nused_memory:(%d+)')) > limit * NEARLY_FULL then return false end

local reply = {}
for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
    local trace_id, digest, submission, as_letter = unpack(ARGV, argument, argument + ARGUMENTS - 1)
    local state, known_digest = read(record, 'state', 'digest')
    if (state == 'pending' or state == 'decided') and known_digest ~= digest then
        reply[#reply + 1] = ''
    elseif state == 'decided' then
        reply[#reply + 1] = 'decided'
    else
        -- A dead trace submitted again gets another chance, as a new submission, with whatever it says now.
        if state ~= 'pending' then to_pending(record, trace_id, digest, pending, counts, now) end
        redis.call('HSET', record, 'submission', submission, 'as_letter', digest .. as_letter)
        redis.call('ZADD', pending, now, trace_id)
        reply[#reply + 1] = 'pending'
    end
end
return reply
