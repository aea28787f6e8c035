-- Erase a trace's entries from a novelty log, and note that for the mirrors that have read them.
--
-- KEYS   log, erasures, record
-- ARGV   erasures_ttl_ms, most, entries...
-- Reply  how many entries there were
--
-- No more than `most` erasures are kept.

expect('stream', log, erasures)

local erased = 0
for _, entry in ipairs(entries) do
    if redis.call('XDEL', log, entry) == 1 then
        erased = erased + 1
        redis.call('XADD', erasures, 'MAXLEN', '~', most, '*', 'e', entry)
        redis.call('PEXPIRE', erasures, erasures_ttl_ms)
    end
end
-- Should this be all that gets done, the trace must not look for its vector where there is none any more.
redis.pcall('HDEL', record, 'epoch', 'entry')
return erased
