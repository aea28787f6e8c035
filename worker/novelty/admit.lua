-- Admit traces to a novelty log, in order, once each.
--
-- KEYS  log, head, then the ledger record of each candidate
-- ARGV  epoch for a new log, window's max_elements, ttl_ms, slack_elements, slack_ms, record's ttl_ms,
--       then for each candidate: trace id, content digest, vector bytes
-- Reply for each candidate its entry id, or an empty string if its id was taken by other content

local log, head = KEYS[1], KEYS[2]
local max_elements, ttl_ms = tonumber(ARGV[2]), tonumber(ARGV[3])
local slack_elements, slack_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
local record_ttl_ms = ARGV[6]

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local known = redis.call('HMGET', head, 'epoch', 'time_ms', 'place')
local epoch = known[1] or ARGV[1]
local time, place = tonumber(known[2] or 0), tonumber(known[3] or 0)
-- The log's time never goes back, even if the server's clock does, so that entry ids keep growing.
if now > time then time = now end

-- A place is given back only while everything its window needs is sure to be in the log and in every mirror.
local function is_within_slack(entry)
    local entry_time, entry_place = string.match(entry, '^(%d+)-(%d+)$')
    return tonumber(entry_place) > place - slack_elements and tonumber(entry_time) > time - slack_ms
end

local function append(trace_id, content, vector)
    place = place + 1
    local entry = string.format('%.0f-%.0f', time, place)
    redis.call('XADD', log, entry, 'i', trace_id, 'c', content, 'v', vector)
    return entry
end

local reply = {}
local appended = false
for i = 3, #KEYS do
    local record_key = KEYS[i]
    local argument = 7 + (i - 3) * 3
    local trace_id, content, vector = ARGV[argument], ARGV[argument + 1], ARGV[argument + 2]
    local record = redis.call('HMGET', record_key, 'content', 'epoch', 'entry', 'given_up')
    local entry = record[2] == epoch and record[3]
    if record[1] and record[1] ~= content then
        entry = ''
    elseif not (entry and is_within_slack(entry)) then
        if entry then
            redis.call('HSET', record_key, 'given_up', (record[4] or '') .. ' ' .. entry)
        end
        entry = append(trace_id, content, vector)
        -- No state: if Redis came back without the record, the ledger must open and count it when it meets it next.
        redis.call('HSET', record_key, 'content', content, 'epoch', epoch, 'entry', entry)
        redis.call('PEXPIRE', record_key, record_ttl_ms)
        appended = true
    end
    reply[#reply + 1] = entry
end

if appended then
    redis.call('HSET', head, 'epoch', epoch, 'time_ms', string.format('%.0f', time), 'place', string.format('%.0f', place))
    redis.call('XTRIM', log, 'MAXLEN', '~', max_elements + slack_elements)
    redis.call('XTRIM', log, 'MINID', '~', string.format('%.0f', math.max(0, time - ttl_ms - slack_ms)))
    redis.call('PEXPIRE', log, string.format('%.0f', ttl_ms + slack_ms))
    -- The head must outlive the log: a log that went on from place 1 would give places out twice.
    redis.call('PEXPIRE', head, string.format('%.0f', ttl_ms + slack_ms + 60000))
end
return reply
