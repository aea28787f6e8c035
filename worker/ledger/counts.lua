-- Count the submissions, as of one moment. A script, as a transaction would be refused while Redis is full.
--
-- KEYS  index of pending, counts
-- Reply submitted, pending, decided, dead

local counts = redis.call('HMGET', KEYS[2], 'submitted', 'decided', 'dead')
return {tonumber(counts[1] or 0), redis.call('ZCARD', KEYS[1]), tonumber(counts[2] or 0), tonumber(counts[3] or 0)}
