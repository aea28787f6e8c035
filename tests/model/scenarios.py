"""Short sequences that random runs seldom produce. Most were found by a long run and cut down."""

from typing import Final

from tests.model.actions import Step


def _steps(text: str) -> tuple[Step, ...]:
    """Parse steps, each ``name first second``, separated by commas. Numbers that are left out are 0."""
    parts = [part.split() for part in text.split(",")]
    return tuple(Step(name, int(first), int(second)) for name, first, second, *_ in ([*part, "0", "0"] for part in parts))


_HELD_AND_FORGOTTEN: Final = "send_foreign 1, take 0, begin 0, forget 1, go_on, go_on, go_on"
_PLACED_AND_FORGOTTEN: Final = "send_foreign 1, take 0, begin 0, finish, forget 1, go_on, go_on, go_on, go_on"
_UNDECODABLE_BURIED: Final = "send_foreign 1 4, take 1, end"
_DECIDED: Final = "send_foreign {}, take 0, begin, finish, finish, end"
_DECIDED_AND_EXPIRED: Final = f"{_DECIDED.format(0)}, expire"
_REVISED: Final = "send_foreign {} {}, take, revise, revise, revise, revise, end"

SCENARIOS: Final = {
    "a trace forgotten while it is decided, and something undecodable by its name before it is placed": _steps(
        f"{_HELD_AND_FORGOTTEN}, {_UNDECODABLE_BURIED}, finish, finish, finish"
    ),
    "the same before its decision is stored": _steps(f"{_PLACED_AND_FORGOTTEN}, {_UNDECODABLE_BURIED}, finish"),
    "the same, but placed before": _steps(f"{_HELD_AND_FORGOTTEN}, finish, {_UNDECODABLE_BURIED}, finish"),
    "a record that has expired, one after it, and then both forgotten": _steps(
        f"{_DECIDED_AND_EXPIRED}, send_foreign 0, take 0, begin, finish, forget 0, go_on, go_on"
    ),
    "a place that is late already, in a batch that makes it later": _steps(
        ", ".join(
            [
                *[_DECIDED_AND_EXPIRED] * 7,
                "send_foreign 1, take 1, begin, finish",
                *[_DECIDED_AND_EXPIRED] * 4,
                "finish_badly, finish, send_foreign 2, send_foreign 3, take 1 1, begin 0 2, finish",
            ]
        )
    ),
    "a decided trace placed once more, too late for its place": _steps(
        "send_foreign 1, duplicate, take 0 1, begin, finish, begin, finish, move_time 8, finish, finish"
    ),
    "two decided together, of which another worker has decided the first meanwhile": _steps(
        "send_foreign 1, send_foreign 2, duplicate, take 0 1, take 1, begin 0 1, finish, move_time 6 1, begin, begin,"
        "finish 1, finish 1, finish"
    ),
    "a letter dropped, and buried anew, and dropped by one who read it before": _steps(
        "send_foreign 1 4, take 0, end, send_foreign 1 4, drop, go_on, drop, go_on 1, take 1, go_on, end, go_on"
    ),
    "the last burial of what has just been decided": _steps(
        "submit 0 2, go_on, interrupt, move_time 7, resend_lost, go_on, go_on, go_on, take 2, begin, go_on, finish,"
        "move_time 9 7, resend_lost, go_on, go_on, finish, go_on"
    ),
    "a log that begins anew while one reads it": _steps(
        "catch_up 2, send_foreign 1, take 2, begin, finish, clear, send_foreign 3, take 1, begin, finish, finish, finish"
    ),
    "a letter whose time is over, among others": _steps(
        f"{_UNDECODABLE_BURIED}, move_time 10, send_foreign 2 4, take 1, end, {', '.join(['move_time 10'] * 29)},"
        "send_foreign 3 4, take 1, end"
    ),
    "letters that are too many before they are too large": _steps(
        ", ".join(f"send_foreign {number} {kind}, take 1, end" for number, kind in enumerate((5, 4, 4, 4)))
    ),
    "bytes without a name under two names": _steps(
        "send_foreign 1 5, take 0, crash, take 0, crash, take 1, end, send_foreign 1 5, take 2, end, drop, go_on,"
        "send_foreign 2 5, take 0, crash, take 0, crash, take 1, end, go_on"
    ),
    "a trace of which nothing but its record is left for thirty days": _steps(
        "send_foreign 0, take 0, begin, move_time 11 7, resend_lost, go_on"
    ),
    "a resend that comes after the end": _steps(
        "submit 0, go_on, interrupt, move_time 7, resend_lost, go_on, go_on, go_on, take 0, begin, finish, finish, go_on"
    ),
    "a window that leaves the log while a mirror reads on": _steps(
        "send_foreign 2 5, send_foreign 0 2, send_foreign 3 2, submit 3 2, go_on 4 1, submit 4 2, send_foreign 2 2, take 7 10,"
        "submit 0 5, go_on 3 7, begin 9 3, take 6 8, finish 2 1, go_on 0 1, go_on 0 3, move_time 9 3, finish 8 8, begin 0 4,"
        "take 4 7, begin 9 9, send_foreign 1 2, begin 0 6, move_time 8 0, finish 10 11, finish 5 7, move_time 9 4, finish 10 8,"
        "finish 0 5, move_time 8 6"
    ),
    "a copy that cannot be decoded, dead while its trace is decided": _steps(
        "submit 3 2, go_on 6 5, go_on 7 8, take 10 10, begin 0 1, send_foreign 3 2, take_strictly 1 1, end"
    ),
    "a resender that claims a trace which a worker decides": _steps(
        "submit 4, resend_lost 0 1, go_on 6 3, resend_lost 1 2, move_time 8 2, go_on 3 6, take 2 1, begin 2 11"
    ),
    "a batch that fails after one of its traces was forgotten": _steps(
        "send_foreign 2 3, take 6 7, begin 1 8, forget 7 4, finish_badly 6 2"
    ),
    "a place of a dead trace, and other content by its name": _steps(
        "submit 2 3, go_on 10 8, go_on 0 10, take 0 1, begin 1 1, finish 6 4, send_foreign 2 3, take_strictly 1 2, end 6 3,"
        "send_foreign 2 1"
    ),
    "more letters than are kept": _steps(
        "send_foreign 3, send_foreign 1 4, send_foreign 1 5, send_foreign 3 3, send_foreign 3 4"
    ),
    "a decision that is lost as Redis comes back older": _steps(
        "send_foreign 2 2, take 1, begin, remember, finish, finish, come_back"
    ),
    "a dead trace that takes another content, and dies of that": _steps(
        "send_foreign 0 3, take 2, begin, crash 2, take 1, send_foreign 0, crash 1, take 2 2, begin 0 1, send_foreign 0 2"
    ),
    "a trace that dies, is pending again, and dies of the same": _steps(
        "submit 1, go_on, go_on, submit 1, go_on, take_strictly 1 1, go_on, take_strictly"
    ),
    "a late outcome that waits, is looked at, and is due with its trace's decision": _steps(
        "send_foreign 0 7, take, revise, revise, revise, revise, move_time 7, resend_lost, go_on, go_on, send_foreign 0, take,"
        "begin, finish, finish, end, resend_lost, go_on, go_on, go_on, take, revise, revise, revise"
    ),
    "a late outcome whose record is lost before its revision is stored": _steps(
        "send_foreign, take, begin, finish, finish, end, send_foreign 0 7, remember, take, revise, revise, come_back, revise,"
        "revise"
    ),
    "a late outcome whose record is another's before its revision is stored": _steps(
        "send_foreign, take, begin, finish, finish, end, remember, send_foreign 0 7, take, revise, revise, come_back,"
        "send_foreign 0 8, take 1, revise 1, revise, revise, revise"
    ),
    "late outcomes by which a gate keeps a trace and drops it, and drops one and keeps it": _steps(
        ", ".join(
            f"{_DECIDED.format(trace)}, {_REVISED.format(trace, first)}, {_REVISED.format(trace, 13 - first)}"
            for trace, first in ((1, 6), (0, 7))
        )
    ),
    "a forged outcome that is dead before Redis comes back older": _steps(
        "send_foreign 4 8, take 5 11, revise 7 3, remember 1 6, revise 8 3, revise 11 9, end 3, come_back 9 7"
    ),
    "two late outcomes of one trace, judged at once": _steps(
        "send_foreign, take, begin, finish, finish, end, send_foreign 0 6, send_foreign 0 7, take, take 1, revise, revise,"
        "revise 1, revise 1, revise, revise, revise, revise, revise"
    ),
}
