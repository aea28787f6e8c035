-- Count the submissions, as of one moment. A script, as a transaction would be refused while Redis is full.
--
-- KEYS  index of pending, counts
-- Reply submitted, pending, decided, dead

local pending, counts = KEYS[1], KEYS[2]

local submitted, decided, dead = unpack(redis.call('HMGET', counts, 'submitted', 'decided', 'dead'))
return {tonumber(submitted or 0), redis.call('ZCARD', pending), tonumber(decided or 0), tonumber(dead or 0)}
