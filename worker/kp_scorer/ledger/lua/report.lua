-- Replace a worker's report, whether Redis is full or not.
--
-- KEYS   report
-- ARGV   text, ttl_ms

redis.call('DEL', report)
redis.call('SET', report, text, 'PX', ttl_ms)
