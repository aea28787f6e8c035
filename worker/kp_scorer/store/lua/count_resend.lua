-- Count the resend of a pending submission, and note its time.
--
-- KEYS   pending, record_prefix
-- ARGV   trace_id

use_reserve('zset', pending)

local record = record_prefix .. trace_id
-- The submission may have ended meanwhile. ZADD XX cannot tell: it replies 0 both for an update and for a missing member.
if not redis.call('ZSCORE', pending, trace_id) or read(record, 'state') == FOREIGN then return end
redis.call('ZADD', pending, now, trace_id)
add(record, 'resends', 1)
