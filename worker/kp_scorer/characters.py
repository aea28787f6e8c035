"""Characters that a terminal acts on instead of showing them, and how they are shown where content may hold them."""

import re
from typing import Final

_ACTING: Final = (
    "\x00-\x1f\x7f-\x9f"  # C0, which begins escape sequences, DEL and C1, which some terminals take for the same
    "\u2028\u2029"  # they end a line, and with it what a reader takes for one record
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they reorder what stands around them
    "\ud800-\udfff"  # halves of a character, which no output can encode
)
_ACTS: Final = re.compile(f"[{_ACTING}]")
_ACTS_WITHIN_LINES: Final = re.compile(f"(?!\n)[{_ACTING}]")


def acts(text: str) -> bool:
    """Whether a text has a character that a terminal would act on: control, line separator, bidirectional, half of one."""
    return _ACTS.search(text) is not None


def escaped(text: str) -> str:
    r"""A text with each such character written out, as ``\u001b``. Of JSON on one line it says the same, written otherwise."""
    # In JSON they can stand within strings alone, where the escape means the character.
    return _ACTS.sub(_escape, text)


def escaped_lines(text: str) -> str:
    """As ``escaped``, for a text that may have several lines."""
    return _ACTS_WITHIN_LINES.sub(_escape, text)


def _escape(found: "re.Match[str]") -> str:
    return f"\\u{ord(found[0]):04x}"
