-- Remove a dead letter for good, unless it has been buried again; what died with it is forgotten.
--
-- KEYS  index of dead letters, their sizes, this letter
-- ARGV  letter's id, prefix of a record's key, how often it had been buried when it was chosen, and when the last time
-- Reply how many letters there were

local letters, sizes, letter = KEYS[1], KEYS[2], KEYS[3]
expect('zset', letters)
expect('hash', sizes, letter)
local letter_id, record_prefix, chosen_burials, chosen_last_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local burials, last_ms = read(letter, 'burials', 'last_ms')
-- A letter that was dropped meanwhile and buried anew is counted from one again.
if burials ~= chosen_burials or last_ms ~= chosen_last_ms then return 0 end
use_reserve(letters)
return remove_letter(letters, sizes, letter, letter_id, record_prefix)
