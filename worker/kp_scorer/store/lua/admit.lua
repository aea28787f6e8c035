-- Admit traces to a novelty log, in order, once each.
--
-- KEYS  log, head, then the ledger's record of each candidate
-- ARGV  epoch for a new log; the window: max_elements, ttl in ms, slack_elements, slack in ms; ttl of a record in ms;
--       then for each candidate its trace id, its digest and the bytes of its vector
-- Reply for each candidate its entry id, or an empty string if its id was taken by another digest

local log, head = KEYS[1], KEYS[2]
local new_epoch, max_elements, ttl_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local slack_elements, slack_ms, record_ttl_ms = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local FIRST_KEY, FIRST_ARGUMENT, ARGUMENTS = 3, 7, 3

local head_epoch, head_time, head_place = unpack(redis.call('HMGET', head, 'epoch', 'time_ms', 'place'))
local epoch = head_epoch or new_epoch
-- The log's time never goes back, even if the server's clock does, so that entry ids keep growing.
local time, place = math.max(now_ms(), tonumber(head_time or 0)), tonumber(head_place or 0)

-- A trace keeps its place only while everything its window needs is sure to be in the log and in every mirror.
local function is_within_slack(entry)
    local entry_time, entry_place = string.match(entry, '^(%d+)-(%d+)$')
    return tonumber(entry_place) > place - slack_elements and tonumber(entry_time) > time - slack_ms
end

local function append(trace_id, digest, vector)
    place = place + 1
    local entry = string.format('%.0f-%.0f', time, place)
    redis.call('XADD', log, entry, 'i', trace_id, 'd', digest, 'v', vector)
    return entry
end

local reply = {}
local appended = false
for i = FIRST_KEY, #KEYS do
    local record = KEYS[i]
    local argument = FIRST_ARGUMENT + (i - FIRST_KEY) * ARGUMENTS
    local trace_id, digest, vector = ARGV[argument], ARGV[argument + 1], ARGV[argument + 2]
    local known_digest, entry_epoch, entry, given_up = unpack(redis.call('HMGET', record, 'digest', 'epoch', 'entry', 'given_up'))
    entry = entry_epoch == epoch and entry
    if known_digest and known_digest ~= digest then
        entry = ''
    elseif not (entry and is_within_slack(entry)) then
        if entry then
            redis.call('HSET', record, 'given_up', (given_up or '') .. ' ' .. entry)
        end
        entry = append(trace_id, digest, vector)
        -- No state: if Redis came back without the record, the ledger must open and count it when it meets it next.
        redis.call('HSET', record, 'digest', digest, 'epoch', epoch, 'entry', entry)
        redis.call('PEXPIRE', record, record_ttl_ms)
        appended = true
    end
    reply[#reply + 1] = entry
end

if appended then
    redis.call('HSET', head, 'epoch', epoch, 'time_ms', string.format('%.0f', time), 'place', string.format('%.0f', place))
    redis.call('XTRIM', log, 'MAXLEN', '~', max_elements + slack_elements)
    redis.call('XTRIM', log, 'MINID', '~', string.format('%.0f', math.max(0, time - ttl_ms - slack_ms)))
    redis.call('PEXPIRE', log, string.format('%.0f', ttl_ms + slack_ms))
    -- The head must outlive the log: a log that went on from place 1 would assign places twice.
    redis.call('PEXPIRE', head, string.format('%.0f', ttl_ms + slack_ms + 60000))
end
return reply
