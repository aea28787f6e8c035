-- Count the submissions at one moment. This is a script and no transaction, because a full Redis refuses to queue a transaction's
-- commands.
--
-- KEYS   pending, counts
-- Reply  (submitted, pending, decided, dead)

local submitted, decided, dead = read(counts, 'submitted', 'decided', 'dead')
return {number(submitted), redis.call('ZCARD', pending), number(decided), number(dead)}
