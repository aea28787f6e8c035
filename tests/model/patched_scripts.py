"""Patches the scripts to use a clock that the test moves and bounds that it reaches, and mutates one if that is wanted."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from kp_scorer.store import dead_letters, ledger, ledger_reader, novelty_log, scripts

NOW_KEY: Final = "model:now"
DEADLINES_KEY: Final = "model:deadlines"

MOST_NAMES: Final = 2
"""The number of domains that get a tally of their own although no settings name them. It is so small that some get none."""

LETTER_BYTES: Final = 1
"""The bytes that a dead letter counts beside its payload. With so few, letters can be too many before they are too large."""

_OWN: Final = {"MOST_NAMES": MOST_NAMES, "LETTER_BYTES": LETTER_BYTES}
_COUNTS: Final = {"commit": 1, "ledger": 1}
"""The number of times that each script defines one of these bounds."""

_CLOCK: Final = re.compile(r"local function now_ms\(\)\n.*?\nend\n", re.DOTALL)
_BOUND: Final = re.compile(r"local (MOST_NAMES|LETTER_BYTES) = \d+")

# Keys must not expire by Redis' own clock. The prelude notes each lifetime instead, and the test deletes the key when it is
# due.
_PRELUDE: Final = f"""
local server = redis
local function now_ms()
    return tonumber(server.call('GET', '{NOW_KEY}'))
end
local function noting(call) return function(command, key, ...)
    local rest = {{...}}
    if command == 'PEXPIRE' then
        if server.call('EXISTS', key) == 1 then server.call('ZADD', '{DEADLINES_KEY}', now_ms() + rest[1], key) end
        return 1
    end
    if command == 'SET' and rest[2] == 'PX' then
        server.call('ZADD', '{DEADLINES_KEY}', now_ms() + rest[3], key)
        return server.call('SET', key, rest[1])
    end
    local reply = call(command, key, ...)
    if command == 'PERSIST' or server.call('EXISTS', key) == 0 then server.call('ZREM', '{DEADLINES_KEY}', key) end
    return reply
end end
local redis = {{pcall = noting(server.pcall), call = noting(server.call)}}
"""


class Mutant(NamedTuple):
    script: str
    text: str
    """The text of the whole script, with one fault in it."""
    meaning: str
    """The description of the fault, which no other mutant of the script shares."""


text_of: Final = scripts._text


@contextmanager
def patched_scripts(mutant: Mutant | None = None) -> Iterator[None]:
    def patched(name: str) -> str:
        text = mutant.text if mutant and name == mutant.script else text_of(name)
        if name == "common":
            text, count = _CLOCK.subn(lambda _: _PRELUDE, text)
            assert count == 1, "common.lua defines its clock otherwise"
        if name in _COUNTS:
            text, count = _BOUND.subn(lambda bound: f"local {bound[1]} = {_OWN[bound[1]]}", text)
            assert count == _COUNTS[name], f"{name}.lua has other bounds"
        return text

    setattr(scripts, "_text", patched)  # noqa: B010  # what mypy is told about it stays true
    try:
        _compile()
        yield
    finally:
        setattr(scripts, "_text", text_of)  # noqa: B010
        _compile()


def _compile() -> None:
    for module in (dead_letters, ledger, ledger_reader, novelty_log):
        for each in vars(module).values():
            if isinstance(each, scripts.Script):
                each.compile()
