-- Milliseconds of Unix time by Redis' clock, the only one that counts: every script begins with this.
local function now_ms()
    local seconds, microseconds = unpack(redis.call('TIME'))
    return seconds * 1000 + math.floor(microseconds / 1000)
end

