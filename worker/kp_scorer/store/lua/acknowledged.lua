-- What consumer groups have done with a stream. The scripts that look at one begin with this.

local WHOLE = 2 ^ 53

local function is_before(one, other)
    local ms, number = string.match(one, '(%d+)-(%d+)')
    local other_ms, other_number = string.match(other, '(%d+)-(%d+)')
    ms, number, other_ms, other_number = tonumber(ms), tonumber(number), tonumber(other_ms), tonumber(other_number)
    return ms < other_ms or (ms == other_ms and number < other_number)
end

-- The id after this one. It is the same where Lua cannot count so far, which is where no entry of ours is.
local function after(id)
    local ms, number = string.match(id, '(%d+)-(%d+)')
    if tonumber(number) >= WHOLE then return id end
    return string.format('%s-%.0f', ms, tonumber(number) + 1)
end

-- Remove what every consumer group has acknowledged. As long as there is no group, nothing is known to be read.
local function remove_acknowledged(stream)
    if redis.call('XLEN', stream) == 0 then return end
    local first_unread
    for _, found in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
        local group = {}
        for i = 1, #found, 2 do group[found[i]] = found[i + 1] end
        local unread = after(group['last-delivered-id'])
        if group['pending'] > 0 then
            local oldest = redis.call('XPENDING', stream, group['name'])[2]
            if is_before(oldest, unread) then unread = oldest end
        end
        if not first_unread or is_before(unread, first_unread) then first_unread = unread end
    end
    if first_unread then redis.call('XTRIM', stream, 'MINID', first_unread) end
end

