"""What the model must notice: each script with one thing wrong.

``python -m tests.model.mutants`` prints after how many steps it does. Some are defects that the scripts once had.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from tests.model.patched_scripts import Mutant
from tests.model.runs import Failure, prepared, repeat, run
from tests.model.scenarios import SCENARIOS
from tests.model.server import Server, running

LENGTH: Final = 100
MOST_RUNS: Final = 300

_HDEL_OWNER: Final = "redis.call('HDEL', record, 'owner', 'lease_ms')"
_COUNT_LESS: Final = "redis.call('HINCRBY', counts, 'submitted', -1)"
_TALLY: Final = "tally(domain, is_named == '1', outcomes)"
_ALL_OF_PENDING: Final = "'since_ms', 'submission', 'resends', 'owner', 'lease_ms', 'attempts'"

MUTANTS: Final = (
    Mutant("begin", "if is_alive(owner) then", "if false then", "an attempt is charged though the holder lives"),
    Mutant("begin", "tonumber(held_until_ms) > now", "true", "a lease never ends"),
    Mutant("begin", "not is_held and (alone or attempts == 0)", "not is_held", "what has ended a worker is held among others"),
    Mutant(
        "begin", "(state == 'dead' and known_digest ~= digest)", "state == 'dead'", "what is dead is pending again by itself"
    ),
    Mutant("begin", _HDEL_OWNER, "", "a dead worker keeps what it held"),
    Mutant("open", "(state == 'pending' or state == 'decided')", "state == 'decided'", "a pending trace takes another content"),
    Mutant("open", "redis.call('ZADD', pending, now, trace_id)", "", "the time of sending is not renewed"),
    Mutant("open", "'submission', submission, ", "", "there is nothing to send again"),
    Mutant("open", ", 'as_letter', digest .. as_letter", "", "what has ended is not known for itself"),
    Mutant("open", "if state ~= 'pending' then", "if not state then", "what is dead gets no other chance"),
    Mutant("commit", "entry ~= '' and known_entry ~= entry", "false", "a decision may rest on a place given up"),
    Mutant("commit", "elseif state == 'dead' then", "elseif now < 0 then", "what is dead is decided"),
    Mutant("commit", "elseif state == 'decided' then", "elseif now < 0 then", "a later decision replaces the first"),
    Mutant("commit", "if state ~= 'pending' then", "if now < 0 then", "what was forgotten is decided uncounted"),
    Mutant("commit", "(known_digest or state == 'dead')", "known_digest", "what could not be decoded stands for what could"),
    Mutant("commit", _TALLY, "", "what is stored is counted under no domain"),
    Mutant("commit", "reply[#reply + 1] = {'stands'", f"{_TALLY} reply[#reply + 1] = {{'stands'", "what stands counts again"),
    Mutant("commit", "is_named or ", "", "what settings name takes room among the others"),
    Mutant("commit", "redis.call('HINCRBY', tallies, 'names', 1)", "names", "any number of domains is told apart"),
    Mutant("commit", ">= MOST_NAMES", "> MOST_NAMES", "too many domains are told apart"),
    Mutant("commit", "if outcomes == '' then return end", "", "what was not compared counts as if it were"),
    Mutant("commit", "'HINCRBY', compared,", "'HINCRBY', tallies,", "what policies came to is counted among the domains"),
    Mutant("commit", "redis.call('PEXPIRE', compared, compared_ttl_ms)", "", "what policies came to is kept for ever"),
    Mutant("bury", "(not state or state == 'dead' or ends_pending)", "true", "another content's record dies"),
    Mutant(
        "bury", "if state == 'decided' and is_same then return {decision, 0} end", "", "a letter is kept of what is decided"
    ),
    Mutant("bury", "if is_new or ends_pending then", "if is_new then", "what dies again is not counted"),
    Mutant("bury", "if is_new and not ends_pending then", "if is_new then", "what was pending is counted twice"),
    Mutant("bury", "(digest ~= '' or not state)", "digest ~= ''", "what could not be decoded dies under another's digest"),
    Mutant("bury", "or as_letter == (known_digest or '') .. letter_id", "", "what is decided dies where it cannot be decoded"),
    Mutant("bury", "named == '' or is_known", "false", "a letter never gets a name"),
    Mutant("bury", "named == '' or is_known", "is_known", "what could not be decoded has a letter without a name"),
    Mutant("bury", "record, state = nil, nil", "", "a letter speaks for the records of two traces"),
    Mutant("bury", "redis.call('HINCRBY', letter, 'burials', 1)", "", "burials are not counted"),
    Mutant(
        "bury",
        "redis.call('HSETNX', sizes, letter_id, #payload) == 1",
        "redis.call('HSETNX', sizes, letter_id, #payload)",
        "what is buried again takes room twice",
    ),
    Mutant("make_room", "redis.call('HINCRBY', dropped, 'dead letters', count)", "", "what makes room is not counted"),
    Mutant("make_room", "if not is_expired then", "if true then", "what has expired counts as dropped"),
    Mutant(
        "drop",
        "if burials ~= chosen_burials or last_ms ~= chosen_last_ms then",
        "if not burials then",
        "a letter is dropped though it was buried again",
    ),
    Mutant("drop", "or last_ms ~= chosen_last_ms", "", "a letter is dropped though it was dropped and buried anew"),
    Mutant(
        "claim",
        "redis.call('ZADD', pending, now, trace_id)\n        reply",
        "redis.call('HINCRBY', record, 'resends', 1)\n        reply",
        "a resend is counted before it is sent",
    ),
    Mutant("claim", "tonumber(held_until_ms or 0) > now - resend_after_ms", "false", "what a worker is deciding is sent again"),
    Mutant("claim", "math.min(tonumber(redis.call('GET', drained) or 0), now", "math.min(now, now", "what waits is sent again"),
    Mutant("claim", _COUNT_LESS, "", "what is forgotten stays counted"),
    Mutant("resent", "pending, 'XX', now_ms()", "pending, now_ms()", "what has ended is in the index again"),
    Mutant("resent", "redis.call('HINCRBY', record, 'resends', 1)", "", "it is sent again for ever"),
    Mutant("resent", "and redis.call('HGET', record, 'state') == 'pending'", "", "what has ended is counted as sent again"),
    Mutant("release", "redis.call('HGET', record, 'owner') == worker", "true", "a worker lets go of what another holds"),
    Mutant("release", "redis.call('HDEL', record, 'owner')", "", "nothing is let go of"),
    Mutant(
        "release", "redis.call('HSET', record, 'lease_ms', now)", "", "what waits in a worker's hands for the store is lost"
    ),
    Mutant("renew", "now + worker_lease_ms", "now", "a worker that says that it lives is dead"),
    Mutant("renew", "now - remembered_ms", "now + worker_lease_ms", "who renews forgets all others"),
    Mutant("exchange", "is_of_this_log and is_within_slack(entry)", "is_of_this_log", "a place is kept however late it is"),
    Mutant("exchange", "is_of_this_log and is_within_slack(entry)", "false", "a trace gets another place each time"),
    Mutant(
        "exchange", "and known_digest ~= digest then return ''", "and now_ms() < 0 then return ''", "another content is placed"
    ),
    Mutant("exchange", "(known_digest or state == 'dead')", "known_digest", "a dead record takes the digest of what is placed"),
    Mutant(
        "exchange", "if state == 'decided' or state == 'dead' then", "if now_ms() < 0 then", "what is decided loses its place"
    ),
    Mutant("exchange", "if not state then", "if true then", "what is pending expires"),
    Mutant("exchange", "'~', max_elements + slack_elements", "'~', max_elements", "the log is trimmed within windows"),
    Mutant(
        "exchange", "max(0, time - ttl_ms - slack_ms)", "max(0, time - slack_ms)", "the log is trimmed by age within windows"
    ),
    Mutant(
        "erase_entries", "redis.call('HDEL', record, 'epoch', 'entry', 'given_up')", "", "the place of what is erased is kept"
    ),
    Mutant("exchange", "place + #KEYS - FIRST_KEY + 1", "place", "a place is kept whose window its own batch pushes out"),
    Mutant("erase_entries", "if redis.call('XDEL', log, entry) == 1 then", "if true then", "what is not there is erased"),
    Mutant("erase_entries", "redis.call('XADD', erasures, 'MAXLEN', '~', most, '*', 'e', entry)", "", "mirrors are not told"),
    Mutant("erase_record", "redis.call('ZREM', pending, trace_id) == 1", "false", "what is forgotten stays pending"),
    Mutant("erase_record", _COUNT_LESS, "", "what is forgotten stays counted"),
    Mutant(
        "ledger",
        "if known_digest and known_digest ~= digest then give_up_place(record) end",
        "",
        "what is dead keeps its place for another content",
    ),
    Mutant("ledger", "state == 'dead' and record_letter == letter_id", "false", "a dead record stays without its bytes"),
    Mutant(
        "ledger", "state == 'dead' and record_letter == letter_id", "state == 'dead'", "the record goes with any of its letters"
    ),
    Mutant("ledger", "state == 'dead' and record_letter == letter_id", "true", "a record goes that is not dead"),
    Mutant("ledger", "0 - (redis.call('HGET', sizes, letter_id) or 0)", "0", "what is gone still takes room"),
    Mutant("ledger", "count > most or", "", "too many letters are kept"),
    Mutant("ledger", "or bytes > most_bytes", "", "too large letters are kept"),
    Mutant("ledger", "tonumber(last_ms) <= expired_ms", "false", "what has expired takes room"),
    Mutant("ledger", "redis.call('PERSIST', record)", "", "what is pending again expires"),
    Mutant("ledger", "'decision', 'reason', 'detail', 'letter', ", "", "what is pending again is still dead"),
    Mutant("ledger", "'letter', 'as_letter', ", "'letter', ", "what is pending again is taken for what it was"),
    Mutant("ledger", "redis.call('ZREM', pending, trace_id)", "", "what has ended is pending"),
    Mutant("ledger", f"redis.call('HDEL', record, {_ALL_OF_PENDING})", "", "what has ended is held"),
    Mutant("ledger", "redis.call('HINCRBY', counts, 'decided', 1)", "", "decisions are not counted"),
)


def kill(server: Server, mutant: Mutant) -> tuple[int, Failure | None]:
    """Run until the mutant is noticed; give the number of steps that it took, and what was noticed."""
    executed: Counter[str] = Counter()
    with prepared(mutant):
        for steps in SCENARIOS.values():
            executed.update(step.name for step in steps)
            if failure := repeat(server, 0, steps):
                return executed.total(), failure
        for seed in range(MOST_RUNS):
            if failure := run(server, seed, LENGTH, executed, Counter()):
                return executed.total(), failure
    return executed.total(), None


def main() -> int:
    """Print a line for each mutant."""
    survivors = 0
    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as server:
        for mutant in MUTANTS:
            steps, failure = kill(server, mutant)
            survivors += failure is None
            noticed = f"after {steps:6} steps: {failure.violation[:100]!r}" if failure else f"NOT within {steps} steps"
            print(f"{mutant.script:13} {mutant.meaning:60} {noticed}", flush=True)  # noqa: T201
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
