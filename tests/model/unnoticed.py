"""The mutants that do no harm in the model, where nobody else damages records and memory is never full.

Tests in `tests/hostile` and `tests/integration` cover the cases in which they would do harm.
"""

from typing import Final

UNNOTICED: Final[dict[str, list[str]]] = {
    "acquire": [],
    "append": [
        "without first: head_window and head_window ~= window and redis.call('XLEN', log) > 0",
        "without last: head_window and head_window ~= window and redis.call('XLEN', log) > 0",
        "without last: ((known_digest or state == 'dead') and known_digest ~= digest) or state == FOREIGN",
        "without first: entry and entry_epoch == epoch and is_within_slack(entry) and is_in_log(entry, candidate)",
        "without last: entry and entry_epoch == epoch and is_within_slack(entry) and is_in_log(entry, candidate)",
        "without first: candidate.visible ~= '' and candidate.visible ~= digest",
    ],
    "claim_lost": [
        "left out: redis.call('ZADD', pending, now, trace_id)",
        "reversed: is_left",
        "left out: redis.call('ZADD', pending, now, trace_id) (2)",
        "left out: redis.call('ZREM', pending, trace_id)",
        "reversed: since_ms or not has_ended",
        "without first: since_ms or not has_ended",
        "without last: since_ms or not has_ended",
        "left out: add(counts, 'submitted', -1)",
        "left out: redis.call('ZADD', pending, now, trace_id) (5)",
    ],
    "commit": [
        "left out: has_copied = has_copied or (added and not added.err)",
        "reversed: #verdicts > 0 and verdicts[1].fact ~= ''",
        "without last: #verdicts > 0 and verdicts[1].fact ~= ''",
        "reversed: verdict.trace ~= ''",
        "left out: copy(verdict)",
        "reversed: has_copied and (bytes_of(copies) > MOST_COPIED_BYTES or is_nearly_full(memory()))",
        "without first: has_copied and (bytes_of(copies) > MOST_COPIED_BYTES or is_nearly_full(memory()))",
        "without last: has_copied and (bytes_of(copies) > MOST_COPIED_BYTES or is_nearly_full(memory()))",
        "left out: redis.call('DEL', copies)",
    ],
    "count_resend": [
        "without last: not redis.call('ZSCORE', pending, trace_id) or read(record, 'state') == FOREIGN",
    ],
    "dead_letter": [
        "left out: redis.call('DEL', record)",
        "without first: state == 'pending' and as_letter",
        "without last: state == 'pending' and as_letter",
        "without first: state == 'decided' and is_same and (decision or '') ~= unreadable",
        "without last: state == 'decided' and is_same and (decision or '') ~= unreadable",
        "left out: redis.call('HDEL', dead_letter, 'worker', 'queued_ms')",
        "left out: redis.call('HSET', dead_letter, 'worker', worker)",
        "left out: redis.call('HSET', dead_letter, 'queued_ms', queued_ms)",
        "without last: named == '' or is_known",
        "without first: named ~= '' and named ~= trace_id",
        "left out: forget_dead(record_prefix .. named, dead_letter_id)",
    ],
    "drop": [
        "without first: number(burials) ~= chosen_burials or number(last_ms) ~= chosen_last_ms",
    ],
    "erase_entries": [],
    "erase_records": [],
    "facts": [
        "left out: redis.call('XTRIM', kept_facts, 'MINID', string.format('%.0f', math.max(0, now - kept_ttl_ms)))",
    ],
    "ledger": [
        "without last: ((known_digest or state == 'dead') and known_digest ~= digest) or state == FOREIGN",
        "without first: state == 'dead' and died_by == dead_letter_id",
        "without first: first and first ~= newest and (is_over or (kind == 'junk' and is_nearly_full(used, limit)))",
    ],
    "make_room": [],
    "release": [],
    "renew": [
        "left out: redis.call('ZREMRANGEBYSCORE', workers, '-inf', now - remembered_ms)",
    ],
    "revise": [
        "without last: type(due_ms) ~= 'string' or until_ms == FOREIGN",
        "left out: redis.call('HSET', run, ':outcome', 1)",
        "reversed: number(until_ms) == number(due_ms)",
        "left out: redis.call('ZADD', runs, now, run_id)",
        "left out: wake(string.match(revision.trace_id, '[^:]*$'))",
    ],
    "submit": [
        "without first: state == FOREIGN or ((state == 'pending' or state == 'decided') and known_digest ~= digest)",
        "without last: state == FOREIGN or ((state == 'pending' or state == 'decided') and known_digest ~= digest)",
    ],
}
