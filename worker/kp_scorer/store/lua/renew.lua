-- Say that a worker is alive and what it is still deciding, and forget workers that have long been gone.
--
-- KEYS  index of workers, then the record of each trace that the worker is deciding
-- ARGV  the worker, how long it is taken for alive without another word in ms, how long a dead one is remembered in ms, how long
--       it holds a trace without another word in ms
-- Reply for each trace 1 if the worker holds it, else 0

local workers = KEYS[1]
local worker, worker_lease_ms, remembered_ms, lease_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local FIRST_RECORD = 2
local now = now_ms()

-- Removing comes first, as Redis when full lets a script add only then.
redis.call('ZREMRANGEBYSCORE', workers, '-inf', now - remembered_ms)
redis.call('ZADD', workers, now + worker_lease_ms, worker)
redis.call('PEXPIRE', workers, remembered_ms)

local reply = {}
for i = FIRST_RECORD, #KEYS do
    local record = KEYS[i]
    local is_held = redis.call('HGET', record, 'owner') == worker
    if is_held then redis.call('HSET', record, 'lease_ms', now + lease_ms) end
    reply[#reply + 1] = is_held and 1 or 0
end
return reply
