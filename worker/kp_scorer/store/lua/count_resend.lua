-- Count that a pending submission has been sent again, and note when.
--
-- KEYS   pending, record
-- ARGV   trace_id

use_reserve('zset', pending)

-- Unless it has ended meanwhile. ZADD cannot tell: it replies 0 for an update as for a member that is not there, and 0 is true.
if not redis.call('ZSCORE', pending, trace_id) or read(record, 'state') == FOREIGN then return end
redis.call('ZADD', pending, now, trace_id)
add(record, 'resends', 1)
