"""The model notices each script with one thing wrong. Some are defects that the scripts once had."""

from collections import Counter
from functools import partial
from itertools import chain, islice
from typing import Final

import pytest

from tests.model.patched_scripts import Mutant
from tests.model.runs import prepared, repeat, run
from tests.model.scenarios import SCENARIOS
from tests.model.server import Server

LENGTH: Final = 100
MOST_RUNS: Final = 300

_HDEL_OWNER: Final = "redis.call('HDEL', record, 'owner', 'lease_ms')"
_COUNT_LESS: Final = "add(counts, 'submitted', -1)"
_TALLY: Final = "tally('decided ' .. name_of(verdict.domain, verdict.is_known))"
_ALL_OF_PENDING: Final = "'since_ms', 'submission', 'resends', 'owner', 'lease_ms', 'attempts'"

_BY_SCRIPT: Final = {
    "acquire": (
        ("number(redis.call('ZSCORE', workers, owner)) > now", "false", "an attempt is charged though the holder lives"),
        ("number(held_until_ms) > now and number(held_until_ms) <= now + lease_ms", "true", "a lease never ends"),
        ("not is_held and (alone or attempts == 0)", "not is_held", "what has ended a worker is held among others"),
        ("(state == 'dead' and known_digest ~= digest)", "state == 'dead'", "what is dead is pending again by itself"),
        (_HDEL_OWNER, "", "a dead worker keeps what it held"),
    ),
    "submit": (
        ("(state == 'pending' or state == 'decided')", "(state == 'decided')", "a pending trace takes another content"),
        ("call_with_all('ZADD', pending, sent_again)", "", "the time of sending is not renewed"),
        ("known_digest, 'submission', submission.payload,", "known_digest,", "there is nothing to send again"),
        ("payload, 'as_letter', as_letter)\n        end", "payload)\n        end", "what has ended is not known for itself"),
        ("if state == 'pending' then", "if state then", "what is dead gets no other chance"),
    ),
    "commit": (
        ("entry ~= '' and known_entry ~= entry", "false", "a decision may rest on a place given up"),
        ("elseif state == 'dead' then", "elseif now < 0 then", "what is dead is decided"),
        ("elseif state == 'decided' then", "elseif now < 0 then", "a later decision replaces the first"),
        ("if state ~= 'pending' then", "if now < 0 then", "what was forgotten is decided uncounted"),
        ("(known_digest or state == 'dead')", "known_digest", "what could not be decoded stands for what could"),
        (_TALLY, "", "what is stored is counted under no domain"),
        ("reply[i] = {'stands'", f"{_TALLY} reply[i] = {{'stands'", "what stands counts again"),
        ("is_known or ", "", "what settings name takes room among the others"),
        ("names = names + 1", "", "any number of domains is told apart"),
        (">= MOST_NAMES", "> MOST_NAMES", "too many domains are told apart"),
    ),
    "dead_letter": (
        ("(not state or state == 'dead' or ends_pending)", "true", "another content's record dies"),
        (
            "if state == 'decided' and is_same and (decision or '') ~= unreadable then return {decision, 0} end",
            "",
            "what is decided is dead-lettered",
        ),
        ("if is_new or ends_pending then", "if is_new then", "what dies again is not counted"),
        ("if is_new and not ends_pending then", "if is_new then", "what was pending is counted twice"),
        ("(digest ~= '' or not state)", "digest ~= ''", "what could not be decoded dies under another's digest"),
        ("or as_letter == (known_digest or '') .. dead_letter_id", "", "what is decided dies where it cannot be decoded"),
        ("named == '' or is_known", "false", "a letter never gets a name"),
        ("named == '' or is_known", "is_known", "what could not be decoded has a letter without a name"),
        ("record, state = nil, nil", "", "a letter speaks for the records of two traces"),
        ("add(dead_letter, 'burials', 1)", "", "occurrences are not counted"),
        ("add(counts, reason, 1)", "", "reasons are not counted"),
    ),
    "ledger": (
        (
            "    leave_kind(dead_letter_id)\n    local kind",
            "    local kind",
            "what is dead-lettered again takes room twice",
        ),
        (
            "<= 0 then redis.call('HDEL', dead_letter_sizes, kind)",
            "< 0 then redis.call('HDEL', dead_letter_sizes, kind)",
            "no bytes are bytes",
        ),
        ("    redis.call('ZREM', dead_rest, dead_letter_id)", "", "what is gone is in its index"),
        ("JUNK[reason] and 'junk' or 'rest'", "'rest'", "junk pushes out the rest"),
        ("kind == newest_kind and newest_bytes", "false and newest_bytes", "the newest pushes out others by its size"),
        (
            "known_digest == digest and {} or {'epoch', 'entry'}",
            "{}",
            "what is dead keeps its place for another content",
        ),
        ("state == 'dead' and died_by == dead_letter_id", "false", "a dead record stays without its bytes"),
        ("state == 'dead' and died_by == dead_letter_id", "state == 'dead'", "the record goes with any of its letters"),
        ("state == 'dead' and died_by == dead_letter_id", "true", "a record goes that is not dead"),
        ("kind, -bytes)", "kind, 0)", "what is gone still takes room"),
        ("> most or", "< 0 or", "too many letters are kept"),
        ("or bytes > bound", "", "too large letters are kept"),
        ("tonumber(last_ms) <= now - ttl_ms", "false", "what has expired takes room"),
        ("decided_count = decided_count + 1 end", "end", "decisions are not counted"),
        ("if known_digest then redis.call('PERSIST', record) end", "", "what is pending again expires"),
        ("'decision', 'reason', 'detail', 'letter', ", "", "what is pending again is still dead"),
        ("'letter', 'as_letter', ", "'letter', ", "what is pending again is taken for what it was"),
        ("call_with_all('ZREM', pending, ended)", "", "what has ended is pending"),
        (f"redis.call('HDEL', record, {_ALL_OF_PENDING})", "", "what has ended is held"),
    ),
    "make_room": (("add(dropped, reason, 1)", "", "what makes room is not counted"),),
    "drop": (
        (
            "if number(burials) ~= chosen_burials or number(last_ms) ~= chosen_last_ms then",
            "if not burials then",
            "a letter is dropped though it was dead-lettered again",
        ),
        ("or number(last_ms) ~= chosen_last_ms", "", "a letter is dropped though it was dropped and kept anew"),
    ),
    "claim_lost": (
        (
            "redis.call('ZADD', pending, now, trace_id)\n        reply",
            "add(record, 'resends', 1)\n        reply",
            "a resend is counted before it is sent",
        ),
        ("held_until_ms > now - resend_after_ms", "false", "what a worker is deciding is sent again"),
        ("math.min(number(redis.call('GET', drained)), now", "math.min(now, now", "what waits is sent again"),
        (f"redis.call('DEL', record)\n        {_COUNT_LESS}", "redis.call('DEL', record)", "what is forgotten stays counted"),
    ),
    "count_resend": (
        ("not redis.call('ZSCORE', pending, trace_id) or ", "", "what has ended is in the index again"),
        ("add(record, 'resends', 1)", "", "it is sent again for ever"),
    ),
    "release": (
        ("read(record, 'owner') == worker", "true", "a worker releases what another holds"),
        ("redis.call('HDEL', record, 'owner')", "", "nothing is released"),
        ("redis.call('HSET', record, 'lease_ms', now)", "", "what waits in a worker for the store is lost"),
    ),
    "renew": (
        ("now + worker_lease_ms", "now", "a worker that says that it lives is dead"),
        ("now - remembered_ms", "now + worker_lease_ms", "who renews forgets all others"),
        ("redis.call('SET', report, text, 'PX', worker_lease_ms)", "", "a worker reports nothing"),
    ),
    "append": (
        ("is_within_slack(entry) and ", "", "a place is kept however late it is"),
        ("is_within_slack(entry) and", "false and", "a trace gets another place each time"),
        ("and known_digest ~= digest) or", "and now_ms() < 0) or", "another content is placed"),
        ("(known_digest or state == 'dead')", "known_digest", "a dead record takes the digest of what is placed"),
        ("if state == 'decided' or state == 'dead' then", "if now_ms() < 0 then", "what is decided loses its place"),
        ("if not state then", "if true then", "what is pending expires"),
        ("candidate.is_comparable and {} or", "", "nothing counts"),
        ("or {'c', '0'}", "or {}", "what failed counts"),
        ("and candidate.visible ~= digest then", "and now_ms() < 0 then", "copies do not look alike"),
        ("'~', max_elements + slack_elements", "'~', max_elements", "the log is trimmed within windows"),
        ("max(0, time - ttl_ms - slack_ms)", "max(0, time - slack_ms)", "the log is trimmed by age within windows"),
        ("redis.call('HSET', directory, log, 1) == 1", "false", "a log is not listed"),
        ("place + #records", "place", "a place is kept whose window its own batch pushes out"),
    ),
    "erase_entries": (
        ("redis.pcall('HDEL', record_prefix .. trace_id, 'epoch', 'entry')", "", "the place of what is erased is kept"),
        ("if is_wanted[trace_id] then", "if true then", "others are erased"),
        ("redis.call('XADD', erasures, 'MAXLEN', '~', most, '*', 'e', entry)", "", "mirrors are not told"),
    ),
    "erase_records": (
        ("redis.call('ZREM', pending, trace_ids[i]) == 1", "false", "what is forgotten stays pending"),
        (_COUNT_LESS, "", "what is forgotten stays counted"),
    ),
}
"""What is replaced in each script, by what, and what that means."""

MUTANTS: Final = [Mutant(script, *wrong) for script, of_script in _BY_SCRIPT.items() for wrong in of_script]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.script}: {mutant.meaning}")
def test_mutant_is_noticed(server: Server, mutant: Mutant) -> None:
    by_chance = (partial(run, server, seed, LENGTH, Counter[str]()) for seed in range(MOST_RUNS))
    by_hand = (partial(repeat, server, 0, steps) for steps in SCENARIOS.values())
    with prepared(mutant):
        # The first two runs notice more than half of them, and soon; the scenarios most of the others.
        assert any(attempt() for attempt in chain(islice(by_chance, 2), by_hand, by_chance)), "not noticed"
