-- Keep a submission as a dead letter, tell its trace's record, and count it; burying the same again changes nothing but times.
--
-- KEYS  index of dead letters, this letter, index of pending, counts, the trace's record (none if it has none to speak of)
-- ARGV  letter's id, reason, detail, trace id, attempts, payload, ttl of a letter in ms, ttl of a record in ms

local letters, letter, pending, counts, record = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local letter_id, reason, detail, trace_id, attempts, payload = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local letter_ttl_ms, record_ttl_ms = ARGV[7], ARGV[8]
local now = now_ms()

local is_new = redis.call('HSETNX', letter, 'first_ms', now) == 1
redis.call('HSET', letter, 'last_ms', now, 'reason', reason, 'detail', detail, 'trace_id', trace_id, 'attempts', attempts,
    'payload', payload)
redis.call('PEXPIRE', letter, letter_ttl_ms)
redis.call('ZADD', letters, now, letter_id)
redis.call('ZREMRANGEBYSCORE', letters, '-inf', now - letter_ttl_ms)
redis.call('PEXPIRE', letters, letter_ttl_ms)

local state = record and redis.call('HGET', record, 'state')
if state == 'pending' then
    redis.call('ZREM', pending, trace_id)
elseif is_new then
    redis.call('HINCRBY', counts, 'submitted', 1)
end
if state == 'pending' or is_new then redis.call('HINCRBY', counts, 'dead', 1) end
redis.call('PEXPIRE', counts, letter_ttl_ms)
-- A decision that was made stands.
if record and state ~= 'decided' then
    redis.call('HSET', record, 'state', 'dead', 'reason', reason, 'detail', detail)
    redis.call('HDEL', record, 'submission')
    redis.call('PEXPIRE', record, record_ttl_ms)
end
