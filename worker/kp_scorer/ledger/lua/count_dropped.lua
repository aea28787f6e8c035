-- Count decisions that are dropped unread.
--
-- KEYS   dropped
-- ARGV   queue, count

use_reserve(dropped)
add(dropped, queue, count)
