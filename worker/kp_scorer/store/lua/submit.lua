-- Note submissions as pending before they are sent, unless their traces have been decided.
--
-- Uses   ledger
-- KEYS   pending, counts, record_prefix
-- ARGV   submissions... (trace_id, digest, payload, dead_letter_id)
-- Reply  (has_room, states): a state for each trace, empty if its id belongs to another digest; 0 and none if Redis is nearly full

-- This is the backpressure on clients.
if is_nearly_full(memory()) then return {0, {}} end

local states, sent_again = {}, {}
for i, submission in ipairs(submissions) do
    local trace_id, digest = submission.trace_id, submission.digest
    local record = record_prefix .. trace_id
    local state, known_digest = read(record, 'state', 'digest')
    if state == FOREIGN or ((state == 'pending' or state == 'decided') and known_digest ~= digest) then
        states[i] = ''
    elseif state == 'decided' then
        states[i] = 'decided'
    else
        -- A dead trace that is submitted again is a new submission, even with other content.
        local as_letter = digest .. submission.dead_letter_id
        if state == 'pending' then
            redis.call('HSET', record, 'submission', submission.payload, 'as_letter', as_letter)
            sent_again[#sent_again + 1], sent_again[#sent_again + 2] = now, trace_id
        else
            to_pending(record, trace_id, digest, known_digest, 'submission', submission.payload, 'as_letter', as_letter)
        end
        states[i] = 'pending'
    end
end
apply_changes()
call_with_all('ZADD', pending, sent_again)
return {1, states}
