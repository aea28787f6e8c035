-- Erase a trace's entries from a novelty log, and note that for those who have read them.
--
-- KEYS  log, erasures, the trace's record
-- ARGV  ttl of the erasures in ms, largest number of them, then the entry ids
-- Reply how many entries there were

local log, erasures, record = KEYS[1], KEYS[2], KEYS[3]
expect('stream', log, erasures)
expect('hash', record)
local ttl_ms, most = ARGV[1], ARGV[2]
local FIRST_ENTRY = 3

local erased = 0
for i = FIRST_ENTRY, #ARGV do
    local entry = ARGV[i]
    if redis.call('XDEL', log, entry) == 1 then
        erased = erased + 1
        redis.call('XADD', erasures, 'MAXLEN', '~', most, '*', 'e', entry)
        redis.call('PEXPIRE', erasures, ttl_ms)
    end
end
-- Should this be all that gets done, the trace must not look for its vector where there is none any more.
redis.call('HDEL', record, 'epoch', 'entry', 'given_up')
return erased
