-- Replace a worker's report, whether Redis is full or not.
--
-- KEYS   report
-- ARGV   text, ttl_ms

use_reserve(report)
redis.call('SET', report, text, 'PX', ttl_ms)
