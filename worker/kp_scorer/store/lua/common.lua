-- Every script begins with this text. Then `scripts.py` adds locals for the keys and arguments, the local `now` if the script uses
-- it, and calls of `expect` for the keys whose type `keys.py` names, except for those behind `Checks` in the script's header.

-- Return the milliseconds of Unix time by Redis' clock, the only one that counts.
local function now_ms()
    local seconds, microseconds = unpack(redis.call('TIME'))
    return seconds * 1000 + math.floor(microseconds / 1000)
end

-- Return the fields of a hash; return FOREIGN in place of the first if the key has another type.
local FOREIGN = 'foreign'
local function read(record, ...)
    local fields = redis.pcall('HMGET', record, ...)
    if not fields.err then return unpack(fields) end
    if string.find(fields.err, 'WRONGTYPE', 1, true) then return FOREIGN end
    -- Redis refuses for another reason: raise that error.
    return redis.call('HMGET', record, ...)
end

-- Return a count, or a time in ms until the year 9999; 0 if the text is neither. Anyone with write access to Redis can store garbage.
local MOST = 253402300799999
local function number(text)
    local value = tonumber(text or 0)
    return value and value >= 0 and value <= MOST and math.floor(value) or 0
end

-- Call a command; if another application uses the key for something else, raise an error that names it.
local function call(command, key, ...)
    local reply = redis.pcall(command, key, ...)
    if type(reply) ~= 'table' or not reply.err then return reply end
    if string.find(reply.err, 'WRONGTYPE', 1, true) then error('WRONGTYPE ' .. key .. ': another application uses it') end
    -- Redis refuses for another reason: raise that error.
    return redis.call(command, key, ...)
end

-- Call a command on a key with all values, or the first `count`; return the sum of its replies. Values are passed in portions,
-- because Lua's `unpack` fails from some 8,000 values on.
local function call_with_all(command, key, values, count)
    count = count or #values
    local sum = 0
    for i = 1, count, 1000 do sum = sum + call(command, key, unpack(values, i, math.min(i + 999, count))) end
    return sum
end

local function add(key, field, by)
    local sum = number(redis.call('HGET', key, field)) + by
    redis.call('HSET', key, field, string.format('%.0f', sum))
    return sum
end

local LOOKS_AT = {list = {'LLEN'}, hash = {'HGET', ''}, zset = {'ZCARD'}, stream = {'XLEN'}}

-- Raise an error, before anything is written, if another application uses one of these keys for something else. A later error would
-- leave the work half done: a message might be off its queue and not in flight either.
local function expect(kind, key)
    local command, field = unpack(LOOKS_AT[kind])
    local reply = redis.pcall(unpack({command, key, field}))
    if type(reply) == 'table' and reply.err then error('WRONGTYPE ' .. key .. ': expected a ' .. kind .. ', or nothing') end
end

-- Return the bytes that Redis uses, and its maxmemory; 0 is no limit. Buffers for a slow disk or a replica do not count, because
-- Redis does not count them either when it refuses a command.
local function memory()
    local info = redis.call('INFO', 'memory')
    local function bytes(field) return tonumber(string.match(info, '\n' .. field .. ':(%d+)')) end
    return bytes('used_memory') - (bytes('mem_not_counted_for_evict') or 0), bytes('maxmemory')
end

-- Return whether so little memory is left that it is reserved for workers, because their work frees memory.
local function is_nearly_full(used, limit)
    return limit > 0 and used > limit * 0.9
end

local REMOVES_NOTHING = {list = {'LTRIM', 0, -1}, hash = {'HDEL', ''}, zset = {'ZREM', ''}, stream = {'XDEL', '0-0'}}

-- Have a full Redis let this script add something: it does so once a script has called a command that removes something, even if that
-- finds nothing. The scripts that lead from receiving a submission to publishing its decision use this, because ending submissions
-- frees memory.
local function use_reserve(kind, key)
    local command, first, last = unpack(REMOVES_NOTHING[kind])
    call(command, key, unpack({first, last}))
end

-- Return the bytes of memory that a list or stream takes. Beyond 2,000 nodes this is an estimate, as measuring all of them would
-- take Redis more than a millisecond.
local function bytes_of(key)
    return redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 2000) or 0
end

-- Return how many of the first `count` values a key with `unread` ones has room for. It may have `most` values, and takes no more
-- once their sizes reach `most_bytes`; 0 bytes are no limit. So an empty key has room for the first value, however large.
local function room_for(count, size_of, key, unread, most, most_bytes)
    count = math.max(0, math.min(count, most - unread))
    if most_bytes == 0 then return count end
    local used = bytes_of(key)
    for i = 1, count do
        if used >= most_bytes then return i - 1 end
        used = used + size_of(i)
    end
    return count
end

-- Drop the oldest of a key's `unread` values until at most `most` are left, and at most `most_bytes`; the newest one stays. `drop`
-- removes the given number of values; `drop_one` removes the oldest and returns its bytes. Return the number that were dropped.
local function drop_oldest(drop, drop_one, key, unread, most, most_bytes)
    local dropped = math.max(0, unread - most)
    if dropped > 0 then drop(dropped) end
    local used = most_bytes > 0 and bytes_of(key) or 0
    while used > most_bytes and dropped < unread - 1 do
        used = used - drop_one()
        dropped = dropped + 1
    end
    return dropped
end

