-- Note that a message that may end its reader is about to be read, whether Redis is full or not: what it leads to frees memory.
--
-- KEYS   reading
-- ARGV   kept_ms
-- Reply  how many began to read it and did not end, this reader included

use_reserve('hash', reading)
local count = redis.call('HINCRBY', reading, 'begun', 1)
redis.call('PEXPIRE', reading, kept_ms)
return count
