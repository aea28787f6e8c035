-- What every script begins with.

-- Milliseconds of Unix time by Redis' clock, the only one that counts.
local function now_ms()
    local seconds, microseconds = unpack(redis.call('TIME'))
    return seconds * 1000 + math.floor(microseconds / 1000)
end

local function read(record, ...)
    return unpack(redis.call('HMGET', record, ...))
end

local LOOKS_AT = {
    list = function(key) return redis.pcall('LLEN', key) end,
    hash = function(key) return redis.pcall('HGET', key, '') end,
    zset = function(key) return redis.pcall('ZCARD', key) end,
    stream = function(key) return redis.pcall('XLEN', key) end,
}

-- Fail before anything is written if another application has taken one of these keys for something else. What a script has
-- written until an error stays written: a message would be off its queue and in nobody's hand.
local function expect(kind, ...)
    for _, key in ipairs({...}) do
        local found = LOOKS_AT[kind](key)
        if type(found) == 'table' and found.err then error('WRONGTYPE ' .. key .. ': expected a ' .. kind .. ', or nothing') end
    end
end

-- Redis when full lets a script add only after that script has removed something, or tried to. What ends a submission must get
-- through, from taking it to publishing its decision: it is what frees memory.
local function use_reserve(key)
    redis.call('PERSIST', key .. ':none')
end

