"""Texts to their first 512 token ids, with little more work than those need, whatever the text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from kp_scorer.embedding.embedder import MAX_TOKENS, Ids
from kp_scorer.embedding.units import Units, is_splittable
from kp_scorer.errors import SettingsError

_MOST_CHARS_PER_TOKEN: Final = 16
"""Of texts for another tokenizer than BERT's so many characters are read for each token; prose has five."""


class Tokens:
    """A model's tokenizer, truncated to 512 tokens as in the reference.

    The reference cuts after the special tokens are added: a text that is too long keeps its first 512 ids and loses the
    closing [SEP]. Letting the tokenizer truncate would keep [SEP] in place of the 512th token and move scores by up to 0.0025.
    """

    def __init__(self, path: Path) -> None:
        """Read a ``tokenizer.json``; unless it is BERT's, only the first 16 characters for each token are tokenised.

        Raises:
            SettingsError: the file holds no tokenizer.
        """
        try:
            text = path.read_text("utf-8")
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise SettingsError(f"embedding.model: {path} cannot be loaded ({type(error).__name__})") from error
        # The file may set truncation and padding; the reference overrides both.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = self._tokenizer.encode("").ids
        description = json.loads(text)
        is_bert = is_splittable(description) and len(self._special) == 2
        self._units = Units(self._tokenizer, description) if is_bert else None

    def of(self, texts: Sequence[str], most: int = MAX_TOKENS, *, keep_end: bool = False) -> list[Ids]:
        """At most ``most`` ids of each text, special tokens included, exactly as tokenising all of it gives them.

        Of a text that is longer, the first of them, without the closing one; to ``keep_end``, as many from its beginning as
        from its end, between the special tokens.
        """
        row = self._both_ends if keep_end else self._beginning
        return [row(text, most) for text in texts]

    def _beginning(self, text: str, most: int) -> Ids:
        if self._units is None:
            ids: Ids = self._tokenizer.encode(text[: most * _MOST_CHARS_PER_TOKEN]).ids
            return ids[:most]
        return [*self._special[:1], *self._read(self._units, text, most), *self._special[1:]][:most]

    def _both_ends(self, text: str, most: int) -> Ids:
        half = (most - len(self._special)) // 2
        if self._units is None:
            chars = most * _MOST_CHARS_PER_TOKEN // 2
            ids = end = self._encode(text if len(text) <= 2 * chars else f"{text[:chars]} {text[-chars:]}")
        else:
            ids = self._read(self._units, text, 2 * half + 1)
            end = self._read(self._units, text, half, backwards=True) if len(ids) > 2 * half else ids
        if len(ids) > 2 * half:
            ids = ids[:half] + end[-half:]
        return [*self._special[:1], *ids, *self._special[1:]]

    def _read(self, units: Units, text: str, least: int, *, backwards: bool = False) -> Ids:
        """The first ids of a text, ``least`` or more, or all of them where it has fewer; or, ``backwards``, its last ones."""
        ids: Ids = []
        for piece in units.pieces(text, least, backwards=backwards):
            ids = self._encode(piece) + ids if backwards else ids + self._encode(piece)
            if len(ids) >= least:
                break
        return ids

    def _encode(self, text: str) -> Ids:
        # Of many at once the tokenizer would hold the offsets of all; this way it makes none.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: Ids = encoding.ids
        return ids
