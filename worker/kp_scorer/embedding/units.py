"""What a BERT tokenizer makes tokens of, and nothing else: a text's words, punctuation and ideographs, one by one.

What makes no token (white space, control characters, accents) is left out, and a short unit stands for a word that can only
become the unknown token.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_PIECE_CHARS: Final = 500
"""Characters of a piece, or a few more. The most costly to tokenise, long words of syllables, take 10 ms."""

_PLAIN_PIECES: Final = 6
_PLAIN: Final = re.compile(r"[ \n]")
"""So many pieces are what stands between such characters, which no token reaches across: 512 tokens of most long texts."""

_AT_ONCE: Final = 4_096  # Characters whose classes are looked up at once; more would take more memory and no less time.

_DROPPED, _SPACE, _ALONE, _WORD, _UNKNOWN, _ADDED, _OF_ADDED = b"- 1wu[]"
"""Classes of characters: dropped, white space, a token or more by itself, of a word, of a word that is unknown with it, the
first character of an added token, its others."""
_LETTERS: Final = re.compile(rb"[wu]+")
_SURROGATES: Final = range(0xD800, 0xE000)
_ALIKE: Final = (  # Code points of which the first in each range stands for all.
    *(range(0x3400, 0x4DC0), range(0x4E00, 0xA000), range(0x20000, 0x2A6D0), range(0x2A700, 0x2B730)),  # ideographs
    *(range(0x30000, 0xE0000), range(0xE1000, 0xF0000)),  # rare ideographs, and nothing yet
    *(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)),  # private use
)


class Units:
    """Splits texts into units, each of which makes at least one token; joined by spaces they make the tokens of the text.

    BERT's normalizer treats each character alone but for the order of combining marks, so what it makes of each is asked once,
    at the start, which takes a fifth of a second.
    """

    def __init__(self, tokenizer: Tokenizer, description: Mapping[str, Any]) -> None:
        """Split as ``tokenizer`` does, whose ``description`` :func:`is_splittable`."""
        added = sorted(_added_tokens(description), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._added_backwards = re.compile("|".join(re.escape(each[::-1]) for each in added) or r"(?!)")
        self._most_chars = int(description["model"]["max_input_chars_per_word"])
        # One character too many says that a word is too long; its others are skipped.
        self._unit = re.compile(rb"[ -]*(?:(\[\]*|1)|((?:[wu]-*){1,%d})[wu-]*)" % (self._most_chars + 1))
        self._classes = _classes_of_all(tokenizer, _alphabet(description))
        unknown = np.flatnonzero(self._classes == _UNKNOWN)
        self._unknown = chr(unknown[0]) if len(unknown) else "x" * (self._most_chars + 1)

    def pieces(self, text: str, most: int, *, backwards: bool = False) -> Iterator[str]:
        """Yield short texts with the tokens of a text's first ``most`` units; or, ``backwards``, of its last ones."""
        start = 0
        for _ in range(0 if backwards else _PLAIN_PIECES):
            cut = _PLAIN.search(text, start + _PIECE_CHARS, start + _PIECE_CHARS + 100)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        if len(text) - start <= _PIECE_CHARS:
            yield text[start:]
            return
        if backwards:
            units: Iterator[str] = (unit[::-1] for unit in self._first(text[::-1], most, self._added_backwards))
        else:
            units = self._first(text[start:], most, self._added)
        piece: list[str] = []
        chars = 0
        for unit in units:
            piece.append(unit)
            chars += len(unit) + 1
            if chars > _PIECE_CHARS:
                yield " ".join(reversed(piece) if backwards else piece)
                piece, chars = [], 0
        yield " ".join(reversed(piece) if backwards else piece)

    def _first(self, text: str, most: int, added: "re.Pattern[str]") -> Iterator[str]:
        """The first units of a text, at most ``most``."""
        classes = self._classes_in(text)
        for token in islice(added.finditer(text), most):
            classes[token.start() : token.end()] = bytes([_ADDED]) + bytes([_OF_ADDED]) * (len(token[0]) - 1)
        # What is behind the last unit would be searched anew from each of its characters.
        for unit in islice(self._unit.finditer(classes.rstrip(b" -")), most):
            start, end = unit.span(unit.lastindex or 0)
            if unit.lastindex == 1:
                yield text[start:end]
            elif classes.find(_UNKNOWN, start, end) >= 0:
                yield self._unknown
            else:
                letters = "".join([text[run.start() : run.end()] for run in _LETTERS.finditer(classes, start, end)])
                yield letters if len(letters) <= self._most_chars else self._unknown

    def _classes_in(self, text: str) -> bytearray:
        classes = bytearray()
        for start in range(0, len(text), _AT_ONCE):
            codes = np.frombuffer(text[start : start + _AT_ONCE].encode("utf-32-le", "surrogatepass"), "<u4")
            classes += self._classes.take(codes).tobytes()
        return classes


def is_splittable(description: Mapping[str, Any]) -> bool:
    """Whether a tokenizer's description says that it is BERT's, of which the units make the tokens of the text.

    Added tokens are matched in the text as a whole, before anything else. So none may overlap with another, lie within a word,
    or have anything that is dropped. Every letter must begin and continue words, or a word of such could be unknown.
    """
    normalizer, splitter, model = (description.get(part) or {} for part in ("normalizer", "pre_tokenizer", "model"))
    added = _added_tokens(description)
    return (
        normalizer.get("type") == "BertNormalizer"
        and normalizer.get("clean_text") is True
        and normalizer.get("handle_chinese_chars") is True
        and splitter.get("type") == "BertPreTokenizer"
        and model.get("type") == "WordPiece"
        and not any(token["single_word"] or token["normalized"] for token in description["added_tokens"])
        and all(re.fullmatch("[!-~]{1,100}", each) and not each.isalnum() for each in added)
        and not any(each[0] in another[1:] for each in added for another in added)
        and all(
            {letter, model["continuing_subword_prefix"] + letter} <= model["vocab"].keys() for letter in _alphabet(description)
        )
    )


def _added_tokens(description: Mapping[str, Any]) -> list[str]:
    return [token["content"] for token in description["added_tokens"]]


def _alphabet(description: Mapping[str, Any]) -> set[str]:
    return set("".join(description["model"]["vocab"].keys() - set(_added_tokens(description))))


def _classes_of_all(tokenizer: Tokenizer, alphabet: set[str]) -> NDArray[np.uint8]:
    # The tokenizer refuses surrogates, where it is given any.
    classes = np.full(0x110000, _WORD, np.uint8)
    different = np.ones(0x110000, np.bool_)
    for alike in (_SURROGATES, *_ALIKE):
        different[alike.start + (alike != _SURROGATES) : alike.stop] = False
    codes = np.flatnonzero(different)
    for some in np.split(codes, range(_AT_ONCE, len(codes), _AT_ONCE)):
        normal = _normalized(tokenizer, list(map(chr, some)))
        characters = set("".join(normal)) - {" "}
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(" ".join(f"x{each}x" for each in characters))
        delimiters = {piece for piece, _ in pieces} & characters - {"x"}
        classes[some] = [_class_of(each, delimiters, alphabet) for each in normal]
    for alike in _ALIKE:
        classes[alike.start : alike.stop] = classes[alike.start]
    return classes


def _normalized(tokenizer: Tokenizer, characters: Sequence[str]) -> list[str]:
    normalize = tokenizer.normalizer.normalize_str
    _, *normal, _ = normalize(f"!{'!'.join(characters)}!").split("!")
    return normal if len(normal) == len(characters) else list(map(normalize, characters))


def _class_of(normal: str, delimiters: set[str], alphabet: set[str]) -> int:
    if not normal:
        return _DROPPED
    if not normal.strip(" "):
        return _SPACE
    if " " in normal or not delimiters.isdisjoint(normal):
        return _ALONE
    return _WORD if alphabet.issuperset(normal) else _UNKNOWN
