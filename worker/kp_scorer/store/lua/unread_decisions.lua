-- Count what is unread on a stream of decisions.
--
-- KEYS  stream
-- Reply how many entries some consumer group has not acknowledged; all of them if there is no group

local stream = KEYS[1]
expect('stream', stream)

remove_acknowledged(stream)
return redis.call('XLEN', stream)
