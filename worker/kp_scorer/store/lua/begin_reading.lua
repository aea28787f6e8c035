-- Note that a worker is about to read a message that may kill it. A full Redis allows this, because reading leads to steps that free
-- memory.
--
-- KEYS   reading
-- ARGV   kept_ms
-- Reply  the number of workers that began to read it and did not finish, including this one

use_reserve('hash', reading)
local count = redis.call('HINCRBY', reading, 'begun', 1)
redis.call('PEXPIRE', reading, kept_ms)
return count
