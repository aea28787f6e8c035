-- Messages too large for a worker to read, kept aside for a person. The scripts that may meet one begin with this.

local OVERSIZED_MOST, OVERSIZED_BYTES = 100, 64 * 1024 * 1024

-- Keep a message aside, and of the older ones as many as the bounds allow. The newest stays whatever its size: its submission is
-- about to end as a dead letter of its beginning, and this is all there is of the rest.
local function keep_aside(oversized, message, ttl_s)
    redis.call('RPUSH', oversized, message)
    redis.call('EXPIRE', oversized, ttl_s)
    local kept, bytes = 1, #message
    while kept < OVERSIZED_MOST do
        local older = redis.call('LINDEX', oversized, -kept - 1)
        if not older then return end
        bytes = bytes + #older
        if bytes > OVERSIZED_BYTES then break end
        kept = kept + 1
    end
    redis.call('LTRIM', oversized, -kept, -1)
end

