-- Remove the oldest dead letters, those whose time is over, and others while there are too many or too large ones; what died with
-- each is forgotten. Not all at once: a large letter takes the place of many small ones, and Redis has others to serve.
--
-- KEYS  index of dead letters, their sizes, counts of what was dropped
-- ARGV  prefix of a letter's key, prefix of a record's key, largest number to remove, ttl of a letter in ms, largest number of
--       letters, largest number of bytes of all payloads
-- Reply how many were dropped before their time, and 1 if more are to go

local letters, sizes, dropped = KEYS[1], KEYS[2], KEYS[3]
expect('zset', letters)
expect('hash', sizes, dropped)
local letter_prefix, record_prefix, at_once = ARGV[1], ARGV[2], tonumber(ARGV[3])
local letter_ttl_ms, most, most_bytes = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local expired_ms = now_ms() - letter_ttl_ms

use_reserve(letters)

local count = 0
local letter_id, is_expired = next_to_go(letters, sizes, most, most_bytes, expired_ms)
for _ = 1, at_once do
    if not letter_id then break end
    remove_letter(letters, sizes, letter_prefix .. letter_id, letter_id, record_prefix)
    if not is_expired then count = count + 1 end
    letter_id, is_expired = next_to_go(letters, sizes, most, most_bytes, expired_ms)
end
if count > 0 then redis.call('HINCRBY', dropped, 'dead letters', count) end
return {count, letter_id and 1 or 0}
