-- Admit traces to a novelty log, in order, once each, and read what is newer than a mirror's cursor, all as of one moment.
--
-- A script and no transaction, whose commands Redis would refuse while it is full.
--
-- KEYS  log, head, erasures, then the ledger's record of each candidate
-- ARGV  epoch for a new log; the window: max_elements, ttl in ms, slack_elements, slack in ms; ttl of a record in ms;
--       the cursor: newest entry read, newest erasure read (empty strings: none yet); largest number of entries to read;
--       then for each candidate its trace id, its digest and the bytes of its vector
-- Reply  for each candidate its entry id, or an empty string if its id was taken by another digest;
--        the log's epoch; trace id of the cursor's entry, or an empty string if it is not there; 1 if the cursor's erasure is there;
--        newer entries; newer erasures. Or nothing but the window that the log was begun with, if it is another

local log, head, erasures = KEYS[1], KEYS[2], KEYS[3]
expect('stream', log, erasures)
expect('hash', head)
local new_epoch, max_elements, ttl_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local slack_elements, slack_ms, record_ttl_ms = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local last_entry, last_erasure, most = ARGV[7], ARGV[8], ARGV[9]
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 4, 10, 3

local window = table.concat({ARGV[2], ARGV[3], ARGV[4], ARGV[5]}, ' ')

local epoch, head_time, head_place, head_window = read(head, 'epoch', 'time_ms', 'place', 'window')
-- Workers with other windows would disagree on what is new, and trim what each other's windows need.
if head_window and head_window ~= window and redis.call('XLEN', log) > 0 then return {head_window} end

-- The log's time never goes back, even if the server's clock does, so that entry ids keep growing.
local time, place = math.max(now_ms(), tonumber(head_time or 0)), tonumber(head_place or 0)

-- A trace keeps its place only while everything its window needs is sure to be in the log and in every mirror, also when all
-- the candidates that come with it have been appended.
local newest_place = place + #KEYS - FIRST_KEY + 1
local function is_within_slack(entry)
    local entry_time, entry_place = string.match(entry, '^(%d+)-(%d+)$')
    return tonumber(entry_place) > newest_place - slack_elements and tonumber(entry_time) > time - slack_ms
end

local function append(trace_id, digest, vector)
    place = place + 1
    local entry = string.format('%.0f-%.0f', time, place)
    redis.call('XADD', log, entry, 'i', trace_id, 'd', digest, 'v', vector)
    return entry
end

local function admit(record, trace_id, digest, vector)
    local state, known_digest, entry_epoch, entry = read(record, 'state', 'digest', 'epoch', 'entry')
    -- What is dead and has no digest is a submission that could not be decoded, and another one.
    if (known_digest or state == 'dead') and known_digest ~= digest then return '' end
    local is_of_this_log = entry and entry_epoch == epoch
    if is_of_this_log and is_within_slack(entry) then return entry end
    local new_entry = append(trace_id, digest, vector)
    if state == 'decided' or state == 'dead' then
        -- What has ended keeps the place that its end rests on. This one is for the worker's comparison only, which comes too late.
        local given_up = redis.call('HGET', record, 'given_up')
        redis.call('HSET', record, 'given_up', (given_up or '') .. ' ' .. new_entry)
        return new_entry
    end
    if is_of_this_log then give_up_place(record) end
    -- No state: if Redis came back without the record, the ledger must open and count it when it meets it next.
    redis.call('HSET', record, 'digest', digest, 'epoch', epoch, 'entry', new_entry)
    -- What is pending does not expire before it has ended.
    if not state then redis.call('PEXPIRE', record, record_ttl_ms) end
    return new_entry
end

local places = {}
if #KEYS >= FIRST_KEY then
    -- Admitting leads to a decision, which frees memory.
    use_reserve(erasures)
    epoch = epoch or new_epoch
    local known_place = place
    for i = FIRST_KEY, #KEYS do
        local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
        places[#places + 1] = admit(KEYS[i], ARGV[argument], ARGV[argument + 1], ARGV[argument + 2])
    end
    if place > known_place then
        redis.call('HSET', head, 'epoch', epoch, 'time_ms', string.format('%.0f', time), 'place', string.format('%.0f', place),
            'window', window)
        redis.call('XTRIM', log, 'MAXLEN', '~', max_elements + slack_elements)
        redis.call('XTRIM', log, 'MINID', '~', string.format('%.0f', math.max(0, time - ttl_ms - slack_ms)))
        redis.call('PEXPIRE', log, string.format('%.0f', ttl_ms + slack_ms))
        -- The head must outlive the log: a log that went on from place 1 would assign places twice.
        redis.call('PEXPIRE', head, string.format('%.0f', ttl_ms + slack_ms + 60000))
    end
end

local function after(stream, last)
    return redis.call('XRANGE', stream, last == '' and '-' or '(' .. last, '+', 'COUNT', most)
end

local read_last = last_entry ~= '' and redis.call('XRANGE', log, last_entry, last_entry)[1]
local knows_erasure = last_erasure == '' or redis.call('XRANGE', erasures, last_erasure, last_erasure)[1]
return {
    places,
    epoch or '',
    read_last and read_last[2][2] or '',
    knows_erasure and 1 or 0,
    after(log, last_entry),
    after(erasures, last_erasure),
}
