-- Publish messages to a queue, even if Redis is full.
--
-- KEYS   queue
-- Checks queue
-- ARGV   most, most_bytes, is_ring, messages...
-- Reply  (published, unread, dropped): the numbers of messages published now, unread afterwards, and dropped unread
--
-- The queue has room for `most` messages, and for `most_bytes`; 0 is no limit. A ring drops the oldest to make room for the newest.

use_reserve('list', queue)
local function size_of(i) return #messages[i] end
local unread = redis.call('LLEN', queue)
local room = is_ring and #messages or room_for(#messages, size_of, queue, unread, most, most_bytes)
call_with_all('LPUSH', queue, messages, room)
local function drop(count) redis.call('LTRIM', queue, 0, -1 - count) end
local function drop_one() return #redis.call('RPOP', queue) end
unread = unread + room
local dropped = is_ring and drop_oldest(drop, drop_one, queue, unread, most, most_bytes) or 0
return {room, unread - dropped, dropped}
