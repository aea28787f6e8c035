-- Store spans of a run that arrived together, each id once; all of them, or none. Some exporters send a span when it begins, and again
-- when it has ended: only then does it replace the one that is stored.
--
-- Uses   run_spans
-- KEYS   runs, runs_bytes, runs_by_sender, runs_kept, run_prefix
-- ARGV   run_id, queue, sender, most_runs, most_total_bytes, most_spans, most_bytes, quiet_ms, longest_ms, kept_ms,
--        spans... (span_id, content)
-- Reply  (outcome, rejected): stored, closed (the run is submitted or about to be), dead, too_large or full; the number of new
--        spans that are rejected, or of all spans if the run is dead
--
-- A run is a hash. It has each span by its id, and these fields:
--   :bytes, :spans, :first_ms   the size and number of its spans, and the time of the first
--   :queue, :sender             the queue of its trace and the sender that it counts for, if the token of its first spans has them
--   :too_large                  set once spans were rejected for the size of the run
--   :attempts                   the number of claims that may have ended a process
--   :has_waited                 set once the run waits, for spans that it lacks or for its outcome; further spans clear it
--   :until_ms, :outcome         the time until which it waits for its outcome; set once an outcome has come
--   :closed                     set once it takes no more spans: its late outcome, or 1; later, how it has ended
--   :agent                      the id of the agent's span, once the run is closed
--   :span_ids                   the ids of its spans, once these are removed

local run = run_prefix .. run_id
expect('hash', run)
local closed, too_large, first_ms, bytes, count, first_sender, span_ids =
    read(run, ':closed', ':too_large', ':first_ms', ':bytes', ':spans', ':sender', ':span_ids')
if first_ms then sender = first_sender or '' end
local fresh, added, fresh_bytes, latest, listed = {}, 0, 0, {}, {}
for span_id in string.gmatch(span_ids or '', '%S+') do listed[span_id] = true end
-- Within a text, a backslash precedes each quote, so no text looks like this field.
local function has_ended(content)
    local _, last = string.find(content, '"endTimeUnixNano":', 1, true)
    return last and string.find(content, '^"?0*[1-9]', last + 1)
end
for _, span in ipairs(spans) do
    local content, stored = span.content, latest[span.span_id] or redis.call('HGET', run, span.span_id)
    -- An exporter that gets no answer sends all its spans again.
    if not listed[span.span_id] and (not stored or has_ended(content) and not has_ended(stored)) then
        latest[span.span_id] = content
        fresh[#fresh + 1] = span
        added = added + (stored and 0 or 1)
        fresh_bytes = fresh_bytes + #content - #(stored or '')
        too_large = too_large or content == ''
    end
end
if closed == 'dead' then return {'dead', #spans} end
if closed then return {'closed', #fresh} end

too_large = too_large or number(count) + added > most_spans or number(bytes) + fresh_bytes > most_bytes
-- The last fifth is reserved for runs that have begun: without their ends they would occupy their room for longer.
local room = first_ms and most_total_bytes or most_total_bytes * 0.8
-- Where there are several senders, each may begin runs while it has no more than is free, so that none of them fills more than half.
-- Runs that have begun may grow to that half, however much others have begun since.
local own_runs, own_bytes = unpack(redis.call('HMGET', runs_by_sender, sender, sender .. ':bytes'))
local function lacks_room()
    local all_runs = redis.call('ZCARD', runs) + redis.call('ZCARD', runs_kept)
    if not first_ms and all_runs + number(own_runs) >= most_runs then return true end
    local all_bytes, own = number(redis.call('GET', runs_bytes)), number(own_bytes)
    local taken = first_ms and math.max(all_bytes, 2 * own) or all_bytes + own
    return not too_large and taken + fresh_bytes > room or is_nearly_full(memory())
end
-- Spans that are kept to be handed on make room, the oldest first, because spans that are to be decided take precedence.
for _, kept_id in ipairs(redis.call('ZRANGE', runs_kept, 0, 99)) do
    if not lacks_room() then break end
    remove_run(kept_id, 'submitted')
end
if lacks_room() then return {'full', #fresh} end

if too_large then
    redis.call('HSET', run, ':too_large', 1)
else
    for _, span in ipairs(fresh) do redis.call('HSET', run, span.span_id, span.content) end
    redis.call('HINCRBY', run, ':bytes', fresh_bytes)
    redis.call('HINCRBY', run, ':spans', added)
    redis.call('SET', runs_bytes, string.format('%.0f', number(redis.call('GET', runs_bytes)) + fresh_bytes))
    if sender ~= '' then add(runs_by_sender, sender .. ':bytes', fresh_bytes) end
end
if #fresh > 0 then redis.call('HDEL', run, ':has_waited') end
if not first_ms and queue ~= '' then redis.call('HSET', run, ':queue', queue) end
if not first_ms and sender ~= '' then
    redis.call('HSET', run, ':sender', sender)
    add(runs_by_sender, sender, 1)
end
-- Redis' clock may have gone back since the first span.
first_ms = math.min(number(first_ms or now), now)
redis.call('HSET', run, ':first_ms', string.format('%.0f', first_ms))
local due_ms = math.min(now + quiet_ms, first_ms + longest_ms)
redis.call('ZADD', runs, due_ms, run_id)
for _, key in ipairs({runs, runs_bytes, runs_by_sender, run}) do redis.call('PEXPIRE', key, kept_ms) end
return {too_large and 'too_large' or 'stored', too_large and #fresh or 0}
