"""Finds invisible characters, normalises texts, and escapes the characters that a terminal acts on."""

import re
import unicodedata
from typing import Final, Literal

_ACTING: Final = (
    "\x00-\x1f\x7f-\x9f"  # C0, whose ESC begins escape sequences; DEL; C1, with which some terminals begin them
    "\u2028\u2029"  # separators at which some readers end a line, and so a record
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that reorder the text around them
    "\ud800-\udfff"  # lone surrogates, which no output can encode
)
_ANNOTATION: Final = "\ufff9-\ufffb"  # Delimiters of notes between lines. Plain text shows the notes, but not the delimiters.
_FORMAT: Final = "\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd\U00013430-\U0001343f"
_IGNORED: Final = (
    "\u061c\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"  # Default_Ignorable_Code_Point
)
_IS_INVISIBLE: Final = re.compile(f"[{_ACTING}{_ANNOTATION}{_FORMAT}{_IGNORED}]")
UNSEEN: Final = re.compile(f"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f{_ANNOTATION}{_IGNORED}]")
_VISIBLE_ASCII: Final = bytes(range(0x20, 0x7F)) + b"\t\n\v\f\r\x1c\x1d\x1e\x1f"  # ASCII without ``UNSEEN``.
_WIDE_SPACE: Final = re.compile(r"[^\S\x00-\x7f]")
_LONG_RUN: Final = re.compile(r"([^\w\s!-~]{30})(?=[^\w\s!-~])")  # Among others, this matches every combining mark.
_JOINER: Final = "\u034f"  # Invisible; normalisation moves no mark across it.
_HARMLESS_BYTES: Final = 4_000  # If UTF-8 has at most this many more bytes than characters, sorting takes a millisecond.
_IS_ODD_SPACE: Final = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u2800\u3000\U00016fe4]")
_HALF: Final = re.compile("[\ud800-\udfff]")
_ACTS: Final = re.compile(f"[{_ACTING}]")
_ACTS_WITHIN_LINES: Final = re.compile(f"(?!\n)[{_ACTING}]")


def check_name(text: str) -> str:
    """Return a name if it has no invisible character and no other spelling that looks the same; raise ValueError otherwise.

    Letters that resemble others are allowed, and so are repeated, leading and trailing U+0020, because the reference SDK scores
    such domains.
    """
    if _IS_INVISIBLE.search(text):
        raise ValueError("expected no control, format or other invisible characters")
    if _IS_ODD_SPACE.search(text):
        raise ValueError("expected no spaces but U+0020")
    if not unicodedata.is_normalized("NFC", text):
        raise ValueError("expected Unicode's normal form C")
    return text


def without_unseen(text: str) -> str:
    """Return a text without controls other than white space, and without characters that Unicode hides, such as U+200B."""
    return UNSEEN.sub("", text) if UNSEEN.search(_unusual(text)) else text


def without_halves(text: str) -> str:
    """Return a text with U+FFFD in place of lone surrogates, the halves of characters that UTF-8 cannot express."""
    return _HALF.sub("\ufffd", text)


def has_wide_space(text: str) -> bool:
    """Return whether a text has white space beyond ASCII."""
    return _WIDE_SPACE.search(_unusual(text)) is not None


def _unusual(text: str) -> str:
    """Return the characters other than visible ASCII and its white space; searching these few takes a fifth of the time."""
    return text.encode("utf-8", "surrogatepass").translate(None, _VISIBLE_ASCII).decode("utf-8", "surrogatepass")


def normalized(form: Literal["NFC", "NFKD"], text: str) -> str:
    """Return a text from ``without_unseen`` in a normal form of Unicode, with U+034F inserted into long runs of marks."""
    # Python sorts each run of marks. Before the fix of its issue 149079 this takes quadratic time: seconds for 80 kB of marks.
    if form == "NFKD":
        # Replace the only letters that would become marks, and the ligature that would become 18 characters.
        text = text.replace("\uff9e", "\u3099").replace("\uff9f", "\u309a").replace("\ufdfa", " ")
    if len(text.encode("utf-8", "surrogatepass")) > len(text) + _HARMLESS_BYTES:
        text = _LONG_RUN.sub(rf"\1{_JOINER}", text)
    return unicodedata.normalize(form, text)


def escaped(text: str) -> str:
    r"""Return a text with each character that a terminal acts on escaped, as ``\u001b``. JSON on one line keeps its meaning."""
    # JSON on one line can contain them only in strings, where the escape means the character.
    return _ACTS.sub(_escape, text)


def escaped_lines(text: str) -> str:
    """Escape a text as ``escaped`` does, but keep its line ends."""
    return _ACTS_WITHIN_LINES.sub(_escape, text)


def _escape(character: "re.Match[str]") -> str:
    return f"\\u{ord(character[0]):04x}"
