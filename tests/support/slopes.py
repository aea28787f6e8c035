"""Tests whether work takes processor time in proportion to its input, by an input and one that is four times as large."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from tests.support.json_values import Place, places_in, value_at

QUICK_S: Final = 0.1
"""Work that takes less than this on the larger input is not steep: quadratic work would take seconds."""
_STEEP: Final = 11.0  # Linear work takes four times as long, quadratic work sixteen times.
_MAJORITY: Final = 4


def seconds_for(work: Callable[[], object]) -> float:
    # A collection visits all objects that earlier tests left, which takes longer than most work that is measured here.
    gc.disable()
    try:
        started = time.process_time()
        work()
        return time.process_time() - started
    finally:
        gc.enable()


def is_steep(work: Callable[[Any], object], made: Callable[[int], Any], size: int) -> bool:
    """Return whether time grows faster than the size of the input, by the majority of seven measurements.

    The two sizes are measured in turn, because other work may slow the machine down by half for seconds.
    """
    large, small = made(4 * size), made(size)
    if seconds_for(lambda: work(large)) < QUICK_S:
        return False
    verdicts: Counter[bool] = Counter()
    while max(verdicts.values(), default=0) < _MAJORITY:
        least_s = max(0.005, seconds_for(lambda: work(small)))
        verdicts[seconds_for(lambda: work(large)) > _STEEP * least_s] += 1
    return verdicts[True] == _MAJORITY


UNITS: Final = (
    *("'", '"', "\\'", '\\"', "'''", '"' * 3, "\\", "\\\\", "`", "```bash\n", "```bash ", "``` \n"),
    *(" ", "\n", "\t", "a", "a ", "a_", "7", "0x7", "-1 ", "\u4e00", "\U0001f600", "\\u0041", "\\x41"),
    *("[", "]", "{", "}", "(", "<", "<a: '", "<a.b>", "{}", "[],", "{},", "'',", '"",', ',"', ",'", "a,", "a.", "a="),
    *("a(b=1),", "{'a':", '{"a":', '{"a":{},', "role='", "content=", "user: ", "\nuser: a", "Error", "Error: ", "/", "%", ".0"),
)
"""The units from which texts are made by repetition."""

BEFORE: Final = ("", "[", "['", '["a\\', "{'a': '", 'role="""', "Message(content=")
"""Beginnings that make a parser read further into a text."""


def leaves_in(value: object, kind: type) -> Iterator[Place]:
    """Yield the paths of a record's values of a type. In each list, only the first item that has such a value counts."""
    shapes: set[Place] = set()
    for place in places_in(value):
        names = tuple("" if isinstance(key, int) else key for key in place)
        if place and isinstance(value_at(value, place), kind) and names not in shapes:
            shapes.add(names)
            yield place
