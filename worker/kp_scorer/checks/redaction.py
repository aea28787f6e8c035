"""Replaces texts that must not reach a trainer: secrets, e-mail addresses, telephone and card numbers, names in home paths."""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from html import unescape
from operator import itemgetter
from typing import Any, Final
from unicodedata import normalize

from kp_scorer.characters import UNSEEN, without_unseen
from kp_scorer.checks.secrets import secrets
from kp_scorer.errors import SettingsError

try:
    import phonenumbers
except ImportError as error:
    raise SettingsError("--secrets needs an extra: pip install 'kp-scorer[secrets]', or use --secrets keep") from error

Span = tuple[int, int, str]  # Start, end and kind.

_PLACEHOLDER: Final = re.compile(r"\[(?:SECRET|EMAIL|PHONE|CARD|USER)_\d+\]")
# A text of JSON may stand within a text that is none, so an escape such as \n also ends a word.
_ESCAPE: Final = r"(?<=\\[nrt])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})"
_EMAIL: Final = re.compile(
    rf"(?:(?<![\w.%+-])(?!(?<=\\)(?:[nrt]|x[0-9A-Fa-f]{{2}}|u[0-9A-Fa-f]{{4}}))|{_ESCAPE}|(?<=[^\x00-\x7f]))(?!git@)"
    # O'Brien and D'Angelo have an apostrophe. Other letters before one begin literals, such as f'' in Python and N'' in SQL.
    r"(?:(?:[\w.%+-]{0,62}[._%+-])?[dlmoDLMO](?:'{1,2}|\\'|’))?"
    r"[\w.%+-]{1,64}(?:@|%(?:25)*40)(?:(?:[^\W_]|-){1,63}\.){1,8}"
    # In Chinese, for one, no space follows an address. In Markdown, underscores may surround it.
    r"(?:[A-Za-z]{2,24}(?!_?[A-Za-z0-9]|@)|[^\W\d_]{2,24}(?!_?[^\W_]|@))"
)
_CARD: Final = re.compile(
    rf"(?:(?<![\w.-])|{_ESCAPE})"
    r"(?:[2-6]\d{3}([ -]?)(?:\d{4}\1){2}\d{1,7}|3[47]\d{2}([ -]?)\d{6}\2\d{5})(?![\w-]|\.\w)"
)
_PHONE: Final = re.compile(
    rf"(?:(?<![\w.+-])|{_ESCAPE})"
    r"(?:\+\d[\d ().-]{6,20}\d|(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4})(?![\w-])"
)
_HOME: Final = re.compile(
    # A path may follow the letter of an option, as in -I/home/alice/include.
    rf"(?:(?<![\w.~-])|{_ESCAPE}|(?<=\s-[A-Za-z]))"
    r"(?:(?:/var|/export)?/home/|/Users/|/mnt/[a-z]/Users/|[A-Za-z]:(?:\\{1,2}|/)Users(?:\\{1,2}|/))([\w.-]{1,64})(?=[^\w.-]|$)"
    # Claude Code names the folder of a project's sessions after its path, with hyphens.
    r"|(?<=[/\\])(?:[A-Za-z]-)?-(?:home|Users)-([\w.]{1,64})(?=[^\w.]|$)"
)
_HIDDEN: Final = re.compile(
    r"(?<!\\)\\++(?:u(?P<u>[0-9A-Fa-f]{4})|x(?P<x>[0-9A-Fa-f]{2})|/)|&(?:#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|commat);|＠|"
    + UNSEEN.pattern
)
_SIGNS: Final = ("\\u", "\\x", "\\/", "&#", "&commat;", "＠")
# Some texts are recognised only once a placeholder stands before or behind them, as in two cells of a table that were joined.
_MOST_PASSES: Final = 8
_LEAST_DIGITS: Final = 9  # Shorter numbers are neither secrets nor card numbers.
_NOBODYS: Final = frozenset("user ubuntu runner node app root vscode shared public default admin agent".split())  # noqa: SIM905
"""Names of home directories in images and systems, which name no person."""


class Redactor:
    """Replaces secrets and personal data by placeholders such as ``[EMAIL_2]``, and equal texts by equal placeholders."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # The number of replacements by kind; a text counts each time.
        self._placeholders: dict[tuple[str, str], str] = {}
        self._numbers: Counter[str] = Counter()

    def redacted(self, value: Any, name: str = "") -> Any:
        """Return JSON with all of its texts redacted, also within texts that are JSON. The ``name`` of its field is a hint."""
        if isinstance(value, dict):
            # A secret in a key may extend to its quotes, unless that is an identifier. Only search it with the whole text then.
            keys = {key: key if key.isidentifier() else self.redacted(key) for key in value}
            return {keys[key]: self.redacted(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [self.redacted(item, name) for item in value]
        if isinstance(value, int | float) and len(text := str(value)) >= _LEAST_DIGITS:
            # Within JSON, a placeholder for a number has to be a text.
            return value if (redacted := self.redacted(text, name)) == text else redacted
        if not isinstance(value, str):
            return value
        if (inner := _json_in(value)) is not None:
            # Search the text as JSON: the names in it are hints, and it stays JSON.
            redacted = self.redacted(inner)
            value = value if redacted == inner else json.dumps(redacted, ensure_ascii=False)
        for _ in range(_MOST_PASSES):
            pieces, end = list[str](), 0
            for start, stop, kind in spans_in(value, name):
                pieces += [value[end:start], self._placeholder(kind, value[start:stop])]
                end = stop
            if not pieces:
                break
            value = "".join([*pieces, value[end:]])
        return value

    def _placeholder(self, kind: str, text: str) -> str:
        self.counts[kind.lower()] += 1
        if (kind, text) not in self._placeholders:
            self._numbers[kind] += 1
            self._placeholders[kind, text] = f"[{kind}_{self._numbers[kind]}]"
        return self._placeholders[kind, text]


def is_clean(value: Any) -> bool:
    """Return whether JSON holds nothing to redact."""
    return bool(Redactor().redacted(value) == value)


def spans_in(text: str, name: str = "") -> list[Span]:
    """Return the spans to redact in a text, in order, without overlaps. The ``name`` of its field (password) is a hint."""
    placeholders = [match.span() for match in _PLACEHOLDER.finditer(text)]
    spans = list[Span]()
    for start, end, kind in sorted(_detected(text, name)):
        # Of the placeholders that end behind the start, only the first may overlap.
        following = bisect_right(placeholders, start, key=itemgetter(1))
        if any(begin < end for begin, _ in placeholders[following : following + 1]):
            continue
        if spans and start < spans[-1][1]:
            first, stop, earlier = spans[-1]
            spans[-1] = first, max(stop, end), earlier
        else:
            spans.append((start, end, kind))
    return spans


def _detected(text: str, name: str) -> Iterator[Span]:
    yield from _detected_in(text, name)
    if any(sign in text for sign in _SIGNS) or without_unseen(text) != text:
        shown, starts, ends = _shown(text)
        for start, end, kind in _detected_in(shown, name):
            yield starts[start], ends[end - 1], kind


def _shown(text: str) -> tuple[str, list[int], list[int]]:
    r"""Return a text as its readers see it, and where each character of that starts and ends in the text.

    Invisible characters such as U+200B are left out. Wide at signs, and escapes such as \u0040 and &#64;, are decoded.
    """
    pieces, starts, ends, end = list[str](), list[int](), list[int](), 0
    for match in _HIDDEN.finditer(text):
        start, code = match.start(), match["u"] or match["x"]
        meant = UNSEEN.sub("", chr(int(code, 16)) if code else normalize("NFKC", unescape(match[0].lstrip("\\"))))
        pieces += text[end:start], meant
        starts += *range(end, start), *[start] * len(meant)
        ends += *range(end + 1, start + 1), *[match.end()] * len(meant)
        end = match.end()
    pieces.append(text[end:])
    return "".join(pieces), [*starts, *range(end, len(text))], [*ends, *range(end + 1, len(text) + 1)]


def _detected_in(text: str, name: str) -> Iterator[Span]:
    before = f"{name}: " if name else ""
    for start, end in secrets.spans(before + text):
        if end > len(before):
            yield max(0, start - len(before)), end - len(before), "SECRET"
    for match in _EMAIL.finditer(text):
        yield *match.span(), "EMAIL"
    for match in _CARD.finditer(text):
        if _passes_luhn(re.sub(r"\D", "", match[0])):
            yield *match.span(), "CARD"
    for match in _PHONE.finditer(text):
        if _is_phone(match[0]):
            yield *match.span(), "PHONE"
    for match in _HOME.finditer(text):
        if (match[1] or match[2]).lower() not in _NOBODYS:
            yield *match.span(match.lastindex or 0), "USER"


def _is_phone(text: str) -> bool:
    try:
        return bool(phonenumbers.is_valid_number(phonenumbers.parse(text, "US")))
    except phonenumbers.NumberParseException:
        return False


def _passes_luhn(digits: str) -> bool:
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return 13 <= len(digits) <= 19 and (sum(map(int, digits[::-2])) + sum(doubled)) % 10 == 0


def _json_in(text: str) -> Any:
    """Parse a text as a JSON object or list; return None if it is neither."""
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
