"""A model's tokenizer, which reads a long text only as far as the model does."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kp_scorer.embedding.embedder import MAX_TOKENS, Ids
from kp_scorer.errors import SettingsError

# A tokenizer other than BERT's reads at most this many characters of a text for each token; prose has five.
_MOST_CHARS_PER_TOKEN: Final = 16
# The approximate length of a piece in characters. The most costly pieces, long words of syllables, take 10 ms to tokenize.
_PIECE_CHARS: Final = 500
_PLAIN_PIECES: Final = 6  # The first 512 tokens of most long texts lie within this many pieces.
_PLAIN: Final = re.compile(r"[ \n]")  # The characters at which these pieces end.
_AT_ONCE: Final = 4_096  # The characters whose classes are looked up at once; more would take more memory and no less time.

_DROPPED, _SPACE, _ALONE, _WORD, _UNKNOWN, _ADDED, _OF_ADDED = b"- 1wu[]"
"""Classes of characters: dropped; white space; makes tokens by itself; part of a word; part of a word, which it makes unknown;
the first character of an added token; another character of an added token.
"""
_LETTERS: Final = re.compile(rb"[wu]+")
_SURROGATES: Final = range(0xD800, 0xE000)
_ALIKE: Final = (  # Ranges of code points that the tokenizer treats alike, so that the first stands for all.
    *(range(0x3400, 0x4DC0), range(0x4E00, 0xA000), range(0x20000, 0x2A6D0), range(0x2A700, 0x2B730)),  # ideographs
    *(range(0x30000, 0xE0000), range(0xE1000, 0xF0000)),  # rare ideographs, and ranges without characters yet
    *(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)),  # private use
)


class Units:
    """Splits texts into units, each of which makes at least one token. Joined by spaces, they make the tokens of the text.

    A unit is a word, a punctuation mark or an ideograph, of which a BERT tokenizer makes tokens. Characters that make no token
    (white space, controls, accents) are left out, and a short unit stands for a word that can only become the unknown token.

    BERT's normalizer treats each character alone, except for the order of combining marks, so its result for each is determined
    once, at the start, which takes a fifth of a second.
    """

    def __init__(self, tokenizer: Tokenizer, description: Mapping[str, Any]) -> None:
        """Split as ``tokenizer`` does. Its ``description`` must pass :func:`is_splittable`."""
        added = sorted(_added_tokens(description), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._added_backwards = re.compile("|".join(re.escape(each[::-1]) for each in added) or r"(?!)")
        self._most_chars = int(description["model"]["max_input_chars_per_word"])
        # Count one character more than a word may have, to see that it is too long, and skip the rest.
        self._unit = re.compile(rb"[ -]*(?:(\[\]*|1)|((?:[wu]-*){1,%d})[wu-]*)" % (self._most_chars + 1))
        self._classes = _classes_of_all(tokenizer, _alphabet(description))
        unknown = np.flatnonzero(self._classes == _UNKNOWN)
        self._unknown = chr(unknown[0]) if len(unknown) else "x" * (self._most_chars + 1)

    def pieces(self, text: str, most: int, *, backwards: bool = False) -> Iterator[str]:
        """Yield short texts that have the tokens of a text's first ``most`` units or, ``backwards``, of its last ones."""
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
        step, added = (-1, self._added_backwards) if backwards else (1, self._added)
        piece = ""
        for unit in self._first(text[start:][::step], most, added):
            piece += f"{unit} "
            if len(piece) > _PIECE_CHARS:
                yield piece[::step]
                piece = ""
        yield piece[::step]

    def _first(self, text: str, most: int, added: "re.Pattern[str]") -> Iterator[str]:
        """Yield up to ``most`` units from the beginning of a text."""
        classes = bytearray()
        for start in range(0, len(text), _AT_ONCE):
            codes = np.frombuffer(text[start : start + _AT_ONCE].encode("utf-32-le", "surrogatepass"), "<u4")
            classes += self._classes.take(codes).tobytes()
        for token in islice(added.finditer(text), most):
            classes[token.start() : token.end()] = bytes([_ADDED]) + bytes([_OF_ADDED]) * (len(token[0]) - 1)
        # Without rstrip, the search behind the last unit would start anew at each of the remaining characters.
        for unit in islice(self._unit.finditer(classes.rstrip(b" -")), most):
            start, end = unit.span(unit.lastindex or 0)
            if unit.lastindex == 1:
                yield text[start:end]
            elif classes.find(_UNKNOWN, start, end) >= 0:
                yield self._unknown
            else:
                letters = "".join([text[run.start() : run.end()] for run in _LETTERS.finditer(classes, start, end)])
                yield letters if len(letters) <= self._most_chars else self._unknown


def is_splittable(description: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer is of BERT's kind, so that the units of a text make exactly its tokens.

    Added tokens are matched in the text as a whole, before anything else. So none may overlap with another, lie within a word,
    or contain a character that is dropped. Every letter must be able to begin and to continue words, or a word of such letters
    could be unknown.
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
    # Surrogates keep the class of letters, because the tokenizer refuses them.
    classes = np.full(0x110000, _WORD, np.uint8)
    different = np.ones(0x110000, np.bool_)
    for alike in (_SURROGATES, *_ALIKE):
        different[alike.start + (alike != _SURROGATES) : alike.stop] = False
    codes = np.flatnonzero(different)
    normalize = tokenizer.normalizer.normalize_str
    for some in np.split(codes, range(_AT_ONCE, len(codes), _AT_ONCE)):
        each_alone = list(map(chr, some))
        _, *normal, _ = normalize(f"!{'!'.join(each_alone)}!").split("!")
        if len(normal) != len(each_alone):
            normal = list(map(normalize, each_alone))
        characters = set("".join(normal)) - {" "}
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(" ".join(f"x{each}x" for each in characters))
        delimiters = {piece for piece, _ in pieces} & characters - {"x"}
        classes[some] = [_class_of(each, delimiters, alphabet) for each in normal]
    for alike in _ALIKE:
        classes[alike.start : alike.stop] = classes[alike.start]
    return classes


def _class_of(normal: str, delimiters: set[str], alphabet: set[str]) -> int:
    if not normal:
        return _DROPPED
    if not normal.strip(" "):
        return _SPACE
    if " " in normal or not delimiters.isdisjoint(normal):
        return _ALONE
    return _WORD if alphabet.issuperset(normal) else _UNKNOWN


class Tokens:
    """A model's tokenizer, truncated to the longest text that the model takes.

    The reference cuts after the special tokens are added: a text that is too long keeps its first 512 ids and loses the
    closing [SEP]. Letting the tokenizer truncate, as sentence-transformers does, would keep [SEP] in place of the 512th token
    and move scores by up to 0.0025.
    """

    def __init__(self, path: Path, longest: int = MAX_TOKENS, prompt: str = "", *, keeps_closing: bool = False) -> None:
        """Read a ``tokenizer.json``; raise SettingsError if that fails.

        With a tokenizer other than BERT's, a text is cut to 16 characters for each token before it is tokenized.
        """
        try:
            text = path.read_text("utf-8")
            self._tokenizer = Tokenizer.from_str(text)
            # Undo truncation and padding, which the file may set: the reference overrides both.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            # The tokens of a letter show which special tokens open a text, and which close it.
            letter = self._tokenizer.encode("a")
            start = letter.special_tokens_mask.index(0)
            end = len(letter) - letter.special_tokens_mask[::-1].index(0)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise SettingsError(f"embedding.model: {path} cannot be loaded ({type(error).__name__})") from error
        self._longest = longest
        self._prompt = prompt
        self._keeps_closing = keeps_closing
        self._opening: Ids = letter.ids[:start]
        self._closing: Ids = letter.ids[end:]
        description = json.loads(text)
        model = description["model"]
        unknown = model.get("unk_id", self._tokenizer.token_to_id(model.get("unk_token") or ""))
        self.unknown_id = -1 if unknown is None else int(unknown)
        self._units = Units(self._tokenizer, description) if is_splittable(description) else None

    def rows(self, texts: Sequence[str], most: int | None = None, *, keep_end: bool = False) -> list[tuple[Ids, bool]]:
        """Return at most ``most`` ids of each text, by default as many as the model accepts, and whether those are all.

        If the tokenizer is of BERT's kind, they are exactly the ids that tokenizing the whole text gives. Prompt and special
        tokens count. A longer text yields its first ids or, with ``keep_end``, as many from its beginning as from its end,
        between the special tokens.
        """
        texts, most = [self._prompt + text for text in texts], min(most or self._longest, self._longest)
        inner = most - len(self._opening) - len(self._closing)
        half = inner // 2
        fits = 2 * half if keep_end else inner
        chars = most * _MOST_CHARS_PER_TOKEN
        if self._units:
            beginnings = self._read(self._units, texts, fits + 1)
        else:
            ends = [
                f"{text[: chars // 2]} {text[-(chars // 2) :]}" if keep_end and len(text) > chars else text[:chars]
                for text in texts
            ]
            beginnings = self._encode(ends)
        is_whole = [
            len(ids) <= fits and bool(self._units or len(text) <= chars) for text, ids in zip(texts, beginnings, strict=True)
        ]
        rows = beginnings
        if keep_end:
            longer = [index for index, ids in enumerate(beginnings) if len(ids) > fits]
            endings = [beginnings[index] for index in longer]
            if self._units:
                endings = self._read(self._units, [texts[index] for index in longer], half, backwards=True)
            for index, end in zip(longer, endings, strict=True):
                rows[index] = rows[index][:half] + end[-half:]
        elif self._keeps_closing:
            rows = [ids[:fits] for ids in rows]
        return [([*self._opening, *ids, *self._closing][:most], whole) for ids, whole in zip(rows, is_whole, strict=True)]

    def _read(self, units: Units, texts: Sequence[str], least: int, *, backwards: bool = False) -> list[Ids]:
        """Return at least ``least`` ids from the beginning of each text or, ``backwards``, its end; all if there are fewer."""
        rows: list[Ids] = [[] for _ in texts]
        readers = dict(enumerate(units.pieces(text, least, backwards=backwards) for text in texts))
        while readers:
            pieces = {index: piece for index, reader in readers.items() if (piece := next(reader, None)) is not None}
            for index, ids in zip(pieces, self._encode(list(pieces.values())), strict=True):
                rows[index] = ids + rows[index] if backwards else rows[index] + ids
            readers = {index: readers[index] for index in pieces if len(rows[index]) < least}
        return rows

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        # The fast method makes no offsets, and releases the interpreter once for all texts.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
