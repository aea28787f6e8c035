-- Mark a trace as dead, unless it is decided.
--
-- KEYS  the record
-- ARGV  record's ttl_ms, reason

if redis.call('HGET', KEYS[1], 'state') == 'decided' then
    return {}
end
redis.call('HSET', KEYS[1], 'state', 'dead', 'reason', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {}
