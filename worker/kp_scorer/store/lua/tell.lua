-- Put what a worker says of itself in place of its last word, whether Redis is full or not.
--
-- KEYS  the worker's report
-- ARGV  the report as JSON, how long it is kept in ms

local report = KEYS[1]
local text, kept_ms = ARGV[1], ARGV[2]

use_reserve(report)
redis.call('SET', report, text, 'PX', kept_ms)
