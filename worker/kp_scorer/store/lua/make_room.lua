-- Remove dead letters whose time is over, and further ones while they exceed their bounds, each with the record that died by it. A
-- call removes at most at_once of them: many small ones may have to make room for a large one, and while a script runs, Redis serves
-- nobody else.
--
-- Uses   ledger
-- KEYS   dead_letters, dead_letter_sizes, dead_junk, dead_rest, dropped, dead_letter_prefix, record_prefix
-- ARGV   at_once, ttl_ms, most, most_bytes
-- Reply  (reasons, has_too_many): the reason of each that was removed before its time; 1 if more have to be removed

local reasons = {}

use_reserve('zset', dead_letters)
local dead_letter_id, is_early = next_to_go()
for _ = 1, at_once do
    if not dead_letter_id then break end
    local dead_letter = dead_letter_prefix .. dead_letter_id
    local reason = is_early and redis.call('HGET', dead_letter, 'reason')
    if reason then
        reasons[#reasons + 1] = reason
        add(dropped, reason, 1)
    end
    remove_dead_letter(dead_letter, dead_letter_id, redis.call('HGET', dead_letter, 'trace_id') or '')
    dead_letter_id, is_early = next_to_go()
end
return {reasons, dead_letter_id and 1 or 0}
