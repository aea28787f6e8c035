"""Characters that are not shown: which a name must not have, and how those that a terminal acts on are written out."""

import re
import unicodedata
from typing import Final

_ACTING: Final = (
    "\x00-\x1f\x7f-\x9f"  # C0, which begins escape sequences, DEL and C1, which some terminals take for the same
    "\u2028\u2029"  # they end a line, and so a record, for some readers
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they reorder what stands around them
    "\ud800-\udfff"  # halves of a character, which no output can encode
)
_IGNORED: Final = (
    "\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"  # format characters
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"  # Default_Ignorable_Code_Point
)
_IS_INVISIBLE: Final = re.compile(f"[{_ACTING}{_IGNORED}]")
_IS_ODD_SPACE: Final = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u2800\u3000\U00016fe4]")
_ACTS: Final = re.compile(f"[{_ACTING}]")
_ACTS_WITHIN_LINES: Final = re.compile(f"(?!\n)[{_ACTING}]")


def check_name(text: str) -> str:
    """Return a name if nothing in it is invisible and it is written in one way only; raise ValueError otherwise.

    Letters that resemble others are allowed, and U+0020 at its ends and repeated, as the reference SDK scores such domains.
    """
    if _IS_INVISIBLE.search(text):
        raise ValueError("expected no control, format or other invisible characters")
    if _IS_ODD_SPACE.search(text):
        raise ValueError("expected no spaces but U+0020")
    if not unicodedata.is_normalized("NFC", text):
        raise ValueError("expected Unicode's normal form C")
    return text


def escaped(text: str) -> str:
    r"""A text with each character that a terminal acts on written out, as ``\u001b``; JSON on one line still means the same."""
    # In JSON they can stand within strings alone, where the escape means the character.
    return _ACTS.sub(_escape, text)


def escaped_lines(text: str) -> str:
    """As ``escaped``, for a text that may have several lines."""
    return _ACTS_WITHIN_LINES.sub(_escape, text)


def _escape(character: "re.Match[str]") -> str:
    return f"\\u{ord(character[0]):04x}"
