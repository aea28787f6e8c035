-- What every script begins with.

-- Milliseconds of Unix time by Redis' clock, the only one that counts.
local function now_ms()
    local seconds, microseconds = unpack(redis.call('TIME'))
    return seconds * 1000 + math.floor(microseconds / 1000)
end

local function read(record, ...)
    return unpack(redis.call('HMGET', record, ...))
end

-- Redis when full lets a script add only after that script has removed something, or tried to. What ends a submission must get
-- through, from taking it to publishing its decision: it is what frees memory.
local function use_reserve(key)
    redis.call('PERSIST', key .. ':none')
end

