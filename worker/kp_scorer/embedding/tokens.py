"""Texts to their first 512 token ids, with little more work than those need."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from kp_scorer.embedding.engine import Ids
from kp_scorer.embedding.recipe import MAX_TOKENS
from kp_scorer.errors import SettingsError

_PIECE_CHARS: Final = 2_000
"""Characters of a text tokenised at first: enough for 512 tokens in 6 out of 7 long English texts."""

_BOUNDARY: Final = re.compile(r"[ \t\n\r\u4e00-\u9fff]")
"""A text can be cut before any of these without changing a token: see `_is_cuttable`."""


class Tokens:
    """A model's tokenizer, truncated to 512 tokens as in the reference.

    The reference cuts after the special tokens are added: a text that is too long keeps its first 512 ids and loses the
    closing [SEP]. Letting the tokenizer truncate would keep [SEP] in place of the 512th token and move scores by up to 0.0025.
    """

    def __init__(self, path: Path, piece_chars: int = _PIECE_CHARS) -> None:
        """Read a ``tokenizer.json``; texts are tokenised in pieces of about ``piece_chars`` where that is exact.

        Raises:
            SettingsError: the file holds no tokenizer.
        """
        try:
            description = path.read_text("utf-8")
            self._tokenizer = Tokenizer.from_str(description)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise SettingsError(f"embedding.model: {path} cannot be loaded ({type(error).__name__})") from error
        # The file may set truncation and padding; the reference overrides both.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._piece_chars = piece_chars
        self._special = self._tokenizer.encode("").ids
        self._cuttable = _is_cuttable(json.loads(description)) and len(self._special) == 2

    def of(self, texts: Sequence[str], most: int = MAX_TOKENS, *, keep_end: bool = False) -> list[Ids]:
        """At most ``most`` ids of each text, special tokens included, exactly as tokenising all of it gives them.

        Of a text that is longer, the first of them, without the closing one; to ``keep_end``, as many from its beginning as
        from its end, between the special tokens.
        """
        return self._both_ends(texts, most) if keep_end else self._beginnings(texts, most)

    def _beginnings(self, texts: Sequence[str], most: int) -> list[Ids]:
        if not self._cuttable:
            return [encoding.ids[:most] for encoding in self._tokenizer.encode_batch_fast(list(texts))]
        opening, closing = self._special
        rows: list[Ids] = [[opening] for _ in texts]
        ends = [0] * len(texts)
        piece_chars = self._piece_chars
        unfinished = list(range(len(texts)))
        while unfinished:
            pieces = []
            for index in unfinished:
                start, ends[index] = ends[index], _cut(texts[index], ends[index] + piece_chars)
                pieces.append(texts[index][start : ends[index]])
            for index, encoding in zip(unfinished, self._encode(pieces), strict=True):
                rows[index] += encoding.ids
                if ends[index] == len(texts[index]):
                    rows[index].append(closing)
            unfinished = [index for index in unfinished if len(rows[index]) < most and ends[index] < len(texts[index])]
            # Text with few tokens, such as white space, would otherwise take very many rounds.
            piece_chars *= 2
        return [row[:most] for row in rows]

    def _both_ends(self, texts: Sequence[str], most: int) -> list[Ids]:
        opening, closing = self._special[:1], self._special[1:]
        half = (most - len(self._special)) // 2
        rows: list[Ids] = [[] for _ in texts]
        piece_chars = self._piece_chars
        unfinished = list(range(len(texts)))
        while unfinished:
            again = []
            pieces = [self._first_and_last(texts[index], piece_chars) for index in unfinished]
            encodings = iter(self._encode([piece for pair in pieces for piece in pair]))
            for index, (_, last) in zip(unfinished, pieces, strict=True):
                head, tail = next(encodings).ids, next(encodings).ids
                if not last:
                    tail = head[half:] if len(head) <= 2 * half else head[-half:]
                elif min(len(head), len(tail)) < half:
                    again.append(index)
                    continue
                rows[index] = [*opening, *head[:half], *tail[-half:], *closing]
            unfinished = again
            piece_chars *= 2
        return rows

    def _first_and_last(self, text: str, chars: int) -> tuple[str, str]:
        """A piece of either end, of about so many characters; or all of a text that has few more, and nothing."""
        if not self._cuttable or len(text) <= 3 * chars:
            return text, ""
        end, start = _cut(text, chars), _cut(text, len(text) - chars)
        return (text[:end], text[start:]) if end <= start < len(text) else (text, "")

    def _encode(self, pieces: list[str]) -> Any:
        return self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)


def _cut(text: str, start: int) -> int:
    """Index of the first boundary at or after ``start``; the text's end if there is none."""
    found = _BOUNDARY.search(text, start)
    return found.start() if found else len(text)


def _is_cuttable(description: dict[str, Any]) -> bool:
    """Whether tokens before a boundary do not depend on text after it, nor the other way round.

    This holds for BERT's tokenizers. The normalizer treats each character alone, and combining marks with the character that
    they follow, so nothing joins across a boundary. White space, or the space that the normalizer puts before a Chinese
    character, ends a word for the pre-tokenizer, and WordPiece splits words one by one. Added tokens are matched in the text
    as a whole, so none may contain a boundary or depend on its neighbours.
    """
    normalizer, splitter = description.get("normalizer") or {}, description.get("pre_tokenizer") or {}
    return (
        normalizer.get("type") == "BertNormalizer"
        and normalizer.get("handle_chinese_chars") is True
        and splitter.get("type") == "BertPreTokenizer"
        and description["model"].get("type") == "WordPiece"
        and not any(token["single_word"] or _BOUNDARY.search(token["content"]) for token in description["added_tokens"])
    )
