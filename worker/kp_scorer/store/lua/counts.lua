-- Count the submissions, as of one moment. A script, as a transaction would be refused while Redis is full.
--
-- KEYS   pending, counts
-- Reply  (submitted, pending, decided, dead)

local submitted, decided, dead = read(counts, 'submitted', 'decided', 'dead')
return {number(submitted), redis.call('ZCARD', pending), number(decided), number(dead)}
