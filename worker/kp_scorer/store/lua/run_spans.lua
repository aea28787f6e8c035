-- Functions that remove the spans of runs. The scripts that use them name the keys.

-- Span ids stay for this time, because an exporter that gets no answer sends its spans again.
local REMEMBERED_MS = 3600000

-- Remove a run from the open runs, and from its sender's share; return whether it was open.
local function leave_open(run_id)
    if redis.call('ZREM', runs, run_id) == 0 then return false end
    local sender, bytes = unpack(redis.call('HMGET', run_prefix .. run_id, ':sender', ':bytes'))
    if sender and add(runs_by_sender, sender, -1) > 0 then
        add(runs_by_sender, sender .. ':bytes', -number(bytes))
    elseif sender then
        redis.call('HDEL', runs_by_sender, sender, sender .. ':bytes')
    end
    -- A run that somebody has deleted does not name its sender.
    if redis.call('ZCARD', runs) == 0 then redis.call('DEL', runs_by_sender) end
    return true
end

-- Remove a run that has ended, open or kept, and its spans; return whether it was there.
local function remove_run(run_id, ended)
    if not leave_open(run_id) and redis.call('ZREM', runs_kept, run_id) == 0 then return false end
    local run = run_prefix .. run_id
    local left = number(redis.call('GET', runs_bytes)) - number(redis.call('HGET', run, ':bytes'))
    local agent, span_ids = redis.call('HGET', run, ':agent'), {}
    local fields = redis.call('HGETALL', run)
    for i = 1, #fields, 2 do
        if string.sub(fields[i], 1, 1) ~= ':' then span_ids[#span_ids + 1] = fields[i] end
    end
    -- In fields of their own, the ids would take five times the memory, and no limit counts it.
    redis.call('DEL', run)
    redis.call('HSET', run, ':closed', ended, ':agent', agent or '', ':span_ids', table.concat(span_ids, ' '))
    redis.call('PEXPIRE', run, REMEMBERED_MS)
    -- Counts may have been lost on the way, but without runs there are no bytes.
    if left <= 0 or redis.call('ZCARD', runs) + redis.call('ZCARD', runs_kept) == 0 then
        redis.call('DEL', runs_bytes)
    else
        redis.call('SET', runs_bytes, string.format('%.0f', left), 'KEEPTTL')
    end
    return true
end
