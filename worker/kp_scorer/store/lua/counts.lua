-- Count the submissions at one moment. This is no transaction, because Redis refuses to queue its commands while it is full.
--
-- KEYS   pending, counts
-- Reply  (submitted, pending, decided, dead)

local submitted, decided, dead = read(counts, 'submitted', 'decided', 'dead')
return {number(submitted), redis.call('ZCARD', pending), number(decided), number(dead)}
