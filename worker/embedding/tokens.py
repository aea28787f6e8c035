"""Texts to token ids: the first 512 of them, and little more work than those need."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from worker.embedding.embedder import MAX_TOKENS
from worker.embedding.engine import Ids
from worker.errors import SettingsError

_PIECE_CHARS: Final = 2_000
"""How much of a text is tokenised at first: enough for 512 tokens of 6 out of 7 long English texts."""

_BOUNDARY: Final = re.compile(r"[ \t\n\r\u4e00-\u9fff]")
"""Before these a text can be cut without changing a token: see `_is_cuttable`."""


class Tokens:
    """A model's tokenizer, cut at 512 tokens as the reference does it.

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
        # The file may carry a truncation and padding of its own; the reference overrides both.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._piece_chars = piece_chars
        self._special = self._tokenizer.encode("").ids
        self._cuttable = _is_cuttable(json.loads(description)) and len(self._special) == 2

    def of(self, texts: Sequence[str]) -> list[Ids]:
        """The first 512 ids of each text with its special tokens: the very ids that tokenising all of it would give."""
        if not self._cuttable:
            return [encoding.ids[:MAX_TOKENS] for encoding in self._tokenizer.encode_batch_fast(list(texts))]
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
            unfinished = [index for index in unfinished if len(rows[index]) < MAX_TOKENS and ends[index] < len(texts[index])]
            # Text of few tokens a character, such as white space, would otherwise take very many rounds.
            piece_chars *= 2
        return [row[:MAX_TOKENS] for row in rows]

    def _encode(self, pieces: list[str]) -> Any:
        return self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)


def _cut(text: str, start: int) -> int:
    """Where the first boundary at or after ``start`` is; the text's end if there is none."""
    found = _BOUNDARY.search(text, start)
    return found.start() if found else len(text)


def _is_cuttable(description: dict[str, Any]) -> bool:
    """Whether tokens before a boundary depend on nothing behind it, and the other way round.

    So it is with BERT's tokenizers. The normalizer treats each character by itself, and combining marks with the character
    that they follow, so none joins across a boundary. White space, or the space that the normalizer puts before a Chinese
    character, ends a word for the pre-tokenizer, and WordPiece looks at words one by one. Added tokens are found in the
    text as a whole; none may contain a boundary, or want to know what stands beside it.
    """
    normalizer, splitter = description.get("normalizer") or {}, description.get("pre_tokenizer") or {}
    return (
        normalizer.get("type") == "BertNormalizer"
        and normalizer.get("handle_chinese_chars") is True
        and splitter.get("type") == "BertPreTokenizer"
        and description["model"].get("type") == "WordPiece"
        and not any(token["single_word"] or _BOUNDARY.search(token["content"]) for token in description["added_tokens"])
    )
