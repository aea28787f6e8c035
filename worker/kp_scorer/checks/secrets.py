"""Finds secrets in traces: keys, tokens and passwords, by the rules of Kingfisher and some of ours."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final

from kp_scorer.characters import without_halves
from kp_scorer.decision import MOST_FINDINGS, Findings
from kp_scorer.errors import SettingsError
from kp_scorer.files import cache_dir
from kp_scorer.trace import ReasoningTrace

try:
    from kingfisher_sdk import Rules, Scanner
except ImportError as error:
    raise SettingsError("secrets needs its extra: pip install 'kp-scorer[secrets]'") from error


_NAME_CHARS: Final = 64
_PUNCTUATION: Final = re.compile(r"(?<![,;:.!?)\]}>*|\"'`])[,;:.!?)\]}>*|\"'`]++(?=\s|$)")
_ESCAPES: Final = re.compile(r'(?<!\\)\\++(?=")')
_SPACES: Final = re.compile(r"(?<!\\)\\++[nrt]")
_ESCAPED_SLASH: Final = re.compile(r"(?<!\\)\\++/")  # In the JSON that PHP writes, every slash has one.
_PIECE_CHARS: Final = 65_536  # Texts are searched in pieces, because the time for a hostile one grows faster than its length.


class Secrets:
    """Counts secrets by kind, and demands that a trace with any is rejected."""

    version = f"{version('kp-scorer')}+kingfisher.{version('kingfisher-secret-scanner')}"

    def __init__(self) -> None:
        # Add rules of our own, because Kingfisher's miss passwords and keys that only their names give away.
        rules = Rules([Path(__file__).with_name("secrets.yml")], cache_dir=_cache())
        self._scanner = Scanner(rules, redact=True)

    def __call__(self, trace: ReasoningTrace) -> Findings:
        """Return the number of secrets of each kind in all texts of the trace, including those within free-form objects."""
        kinds = Counter[str]()
        for piece in _pieces(_lines(trace.model_dump(exclude_none=True))):
            # A secret that both searches find has the same kind in both, so the union counts it once.
            kinds += self._kinds(piece) | self._kinds(_unpunctuated(_spaced(_ESCAPED_SLASH.sub("/", piece))))
        return Findings(kinds=dict(kinds.most_common(MOST_FINDINGS)), outcome="rejected" if kinds else None)

    def _kinds(self, text: str) -> Counter[str]:
        # A rule is named "collection.name" or "collection.group/name".
        rules = (secret.rule_id.partition(".")[2] for secret in self._scanner.scan(text) if secret.visible)
        return Counter(rule.rpartition("/")[2] for rule in rules)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the places of secrets in a text, as starts and ends in characters. Some may overlap."""
        spaced = _spaced(text)
        places = {*self._spans(text), *self._spans(_unpunctuated(spaced))}
        if escapes := {place for match in _ESCAPES.finditer(spaced) for place in range(*match.span())}:
            # Search without escapes, too: JSON within JSON has more of them than rules allow for.
            indices = [place for place in range(len(text)) if place not in escapes]
            unescaped = "".join(map(spaced.__getitem__, indices))
            places |= {(indices[start], indices[end - 1] + 1) for start, end in self._spans(unescaped)}
        return sorted(places)

    def _spans(self, text: str) -> list[tuple[int, int]]:
        text = without_halves(text)  # Kingfisher encodes it as UTF-8.
        locations = [finding.location for finding in self._scanner.scan(text) if finding.visible] if text else []
        offsets = [(location["start_offset"], location["end_offset"]) for location in locations]
        if not offsets or text.isascii():
            return offsets
        # Count characters, as Kingfisher counts bytes.
        raw = text.encode()
        characters = {place: len(raw[:place].decode("utf-8", "replace")) for pair in offsets for place in pair}
        return [(characters[start], characters[end]) for start, end in offsets]


def _cache() -> Path | None:
    """Return the folder of the compiled rules; None, which is Kingfisher's own choice, if there is no home."""
    try:
        return cache_dir() / "secrets"
    except OSError:
        return None


def _spaced(text: str) -> str:
    r"""Return a text with spaces in place of escapes such as \n: rules would take the letter for the beginning of a secret."""
    return _SPACES.sub(lambda match: " " * len(match[0]), text)


def _unpunctuated(text: str) -> str:
    # Many rules require white space after a secret, where sentences have a comma, or a bracket and a full stop.
    return _PUNCTUATION.sub(lambda match: " " * len(match[0]), text)


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Join lines into texts of some ``_PIECE_CHARS`` characters, without dividing a line, which may hold a secret."""
    piece, chars = list[str](), 0
    for line in lines:
        piece.append(line)
        chars += len(line)
        if chars > _PIECE_CHARS:
            yield "\n".join(piece)
            piece, chars = [], 0
    yield "\n".join(piece)


def _lines(value: object, name: str = "") -> Iterator[str]:
    """Yield the texts and numbers within a value, each with its name: names such as ``password`` give a secret away."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            # Cut a long name, which would be repeated for each of thousands of items.
            yield from _lines(item, key[-_NAME_CHARS:])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _lines(item, name)
    else:
        yield f"{name}: {value}"


secrets: Final = Secrets()
