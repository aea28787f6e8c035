-- Remove a dead letter, and the record that died by it, unless it was dead-lettered again since it was chosen.
--
-- Uses   ledger
-- KEYS   dead_letters, dead_letter_sizes, dead_junk, dead_rest, record_prefix, dead_letter_prefix
-- ARGV   dead_letter_id, trace_id, chosen_burials, chosen_last_ms
-- Reply  1 if the dead letter was removed, else 0

local dead_letter = dead_letter_prefix .. dead_letter_id
expect('hash', dead_letter)

local burials, last_ms = read(dead_letter, 'burials', 'last_ms')
-- If the dead letter was dropped and stored anew meanwhile, its count began at one again, so compare the time as well.
if number(burials) ~= chosen_burials or number(last_ms) ~= chosen_last_ms then return 0 end
use_reserve('zset', dead_letters)
return remove_dead_letter(dead_letter, dead_letter_id, trace_id)
