-- Note that a message that may end its reader is about to be read, even if Redis is full: reading leads to steps that free memory.
--
-- KEYS   reading
-- ARGV   kept_ms
-- Reply  the number of readers that began to read it and did not finish, this one included

use_reserve('hash', reading)
local count = redis.call('HINCRBY', reading, 'begun', 1)
redis.call('PEXPIRE', reading, kept_ms)
return count
