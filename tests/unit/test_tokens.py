"""Cutting a text before it is tokenized never changes an id, with the installed model's tokenizer or with another kind."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kp_scorer.embedding import tokenizer
from kp_scorer.embedding.embedder import MAX_TOKENS, Ids
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.tokenizer import Tokens
from kp_scorer.errors import SettingsError
from tokenizers import Encoding, Tokenizer

from tests.support.calls import calls_during, traced_memory
from tests.support.costly import COSTLY_TEXTS

Description = dict[str, Any]

NASTY = (
    st.sampled_from(["word", "Straße", "İstanbul", "naïve", "e\u0301", "\u0301", "\u0345", "ΟΔΟΣ", "한국어", "ไทย", "हिन्दी"])
    | st.sampled_from(["中文", "日本語", "\u4e00", "\u9fff", "\uf900", "\U00020000", "カ\u3099", "\u3000", "\u00a0", "\u2028"])
    | st.sampled_from([" ", "  ", "\n", "\r\n", "\t", "\x00", "\x85", "\u200b", "\u200d", "\ufeff", "\ufffd", "\u00ad", "\x1f"])
    | st.sampled_from(
        ["👩‍👩‍👧", "🏳️‍🌈", "...", "[SEP]", "[CLS] ", "[MASK]中", "[UNK", "##ing", "don't", "x" * 101, "é" * 60, "-" * 40]
    )
    | st.text(max_size=6)
)
TEXTS = st.lists(NASTY, max_size=60).map("".join) | st.lists(NASTY, max_size=60).map(" ".join)


def ids_of(tokens: Tokens, texts: Sequence[str], most: int | None = None, *, keep_end: bool = False) -> list[Ids]:
    return [ids for ids, _ in tokens.rows(texts, most, keep_end=keep_end)]


@pytest.fixture(scope="module")
def tokenizer_file() -> Path:
    model = find_model("")
    assert model
    return model.tokenizer


def whole_text_tokenizer(file: Path) -> Tokenizer:
    """Return a tokenizer that reads whole texts unchanged."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.fixture(scope="module")
def reference(tokenizer_file: Path) -> Tokenizer:
    """Tokenize as the reference does: read the whole text, add the special tokens, and only then cut."""
    return whole_text_tokenizer(tokenizer_file)


def changed_file(tokenizer_file: Path, directory: Path, change: Callable[[Description], object]) -> Path:
    """Write the file of a tokenizer with a changed description."""
    change(description := json.loads(tokenizer_file.read_text("utf-8")))
    changed = directory / "tokenizer.json"
    changed.write_text(json.dumps(description), "utf-8")
    return changed


@contextmanager
def in_pieces(chars: int) -> Iterator[None]:
    """Make the tokenizer read and tokenize texts in pieces of this many characters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_PIECE_CHARS", chars)
        patch.setattr(tokenizer, "_AT_ONCE", chars)
        yield


@pytest.fixture(scope="module")
def ours(tokenizer_file: Path) -> Tokens:
    return Tokens(tokenizer_file)


@pytest.mark.parametrize("chars", [1, 7, 100])
@given(texts=st.lists(TEXTS, max_size=4), most=st.sampled_from([8, 20, 96]))
@example(texts=[" " * 5_000 + "word", "", "x" * 5_000, "中" * 1_500, "tree " * 18, "tree " * 19], most=20)
@example(texts=["tree " * words for words in range(509, 513)], most=20)
def test_pieces_give_the_ids_of_the_whole_text_or_of_both_its_ends(
    ours: Tokens, reference: Tokenizer, chars: int, texts: list[str], most: int
) -> None:
    with in_pieces(chars):
        beginnings, both_ends = ids_of(ours, texts), ids_of(ours, texts, most, keep_end=True)
    for text, beginning, ids in zip(texts, beginnings, both_ends, strict=True):
        complete = reference.encode(text).ids
        assert beginning == complete[:MAX_TOKENS]
        half = most // 2
        assert ids == (complete if len(complete) <= most else complete[:half] + complete[-half:])


@settings(max_examples=settings().max_examples // 2)
@given(parts=st.lists(st.tuples(NASTY | st.characters(), st.sampled_from([1, 2, 99, 100, 101, 20_000])), max_size=12))
@example(parts=[("\u0301", 20_000), ("[SEP]", 600)])
@example(parts=[("x", 4_090), ("[MASK]", 2), ("x", 8_180), ("\x00", 99), ("\u2603", 1)])
def test_runs_of_any_length_give_the_ids_of_the_whole_text(
    ours: Tokens, reference: Tokenizer, parts: list[tuple[str, int]]
) -> None:
    text = "".join(part * times for part, times in parts)[:40_000]
    complete = reference.encode(text).ids
    assert ids_of(ours, [text]) == [complete[:MAX_TOKENS]]
    (both_ends,) = ids_of(ours, [text], 96, keep_end=True)
    assert both_ends == (complete if len(complete) <= 96 else complete[:48] + complete[-48:])


def test_every_character_is_treated_as_the_tokenizer_does(tokenizer_file: Path, reference: Tokenizer) -> None:
    ours = Tokens(tokenizer_file, longest=10_000)
    # Each plane that is private or has no assigned characters is represented by its first 256 characters.
    for start in (*range(0, 0x40000, 256), *range(0x40000, 0xE0000, 0x10000), *range(0xE0000, 0xE0200, 256), 0xF0000, 0x100000):
        if not 0xD800 <= start < 0xE000:
            text = "".join(f"o{char}o {char}. " for char in map(chr, range(start, start + 256)))
            assert ids_of(ours, [text]) == [reference.encode(text).ids], hex(start)


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.chars = 0

    def encode(self, text: str) -> Encoding:
        self.chars += len(text)
        return self._tokenizer.encode(text)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        self.chars += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def chars_tokenised(tokens: Tokens, text: str, most: int, keep_end: bool) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_tokenizer", counting := Counting(tokens._tokenizer))
        ids_of(tokens, [text], most, keep_end=keep_end)
    return counting.chars


@pytest.mark.parametrize("keep_end", [False, True])
@pytest.mark.parametrize("text", COSTLY_TEXTS.values(), ids=COSTLY_TEXTS)
def test_the_most_costly_texts_take_few_steps_and_little_memory(ours: Tokens, text: str, keep_end: bool) -> None:
    # The longest token has 18 characters.
    assert chars_tokenised(ours, text, MAX_TOKENS, keep_end) < 20 * MAX_TOKENS
    assert calls_during(lambda: ids_of(ours, [text], MAX_TOKENS, keep_end=keep_end)) < 20 * MAX_TOKENS
    with traced_memory() as memory:
        ids_of(ours, [text], MAX_TOKENS, keep_end=keep_end)
    assert memory.peak_bytes < 10_000_000


def test_characters_that_a_process_meets_first_cost_no_more_than_others(tokenizer_file: Path) -> None:
    tokens = Tokens(tokenizer_file)
    text = "".join(map(chr, (*range(0xA0, 0xD800), *range(0xF900, 0x30000))))
    first, again = (calls_during(lambda: ids_of(tokens, [text], 256, keep_end=True)) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("keeps_closing", [False, True])
@pytest.mark.parametrize("is_bert", [False, True])
def test_a_row_says_whether_it_has_the_whole_text(
    tokenizer_file: Path, tmp_path: Path, is_bert: bool, keeps_closing: bool
) -> None:
    file = tokenizer_file if is_bert else changed_file(tokenizer_file, tmp_path, ALTERATIONS["no BERT normalizer"])
    tokens = Tokens(file, 96, keeps_closing=keeps_closing)
    for words, keep_end in product((0, 93, 94, 95, 96, 5_000), (False, True)):
        ((ids, is_whole),) = tokens.rows(["tree " * words], keep_end=keep_end)
        assert (is_whole, len(ids)) == (words <= 94, min(words + 2, 96))


ALTERATIONS: Final[dict[str, Callable[[Description], object]]] = {
    "no BERT normalizer": lambda altered: altered.update(normalizer={"type": "Lowercase"}),
    "no word pieces": lambda altered: altered.update(
        model={"type": "WordLevel", "vocab": altered["model"]["vocab"], "unk_token": "[UNK]"}
    ),
    "an added space": lambda altered: altered["added_tokens"].append(
        altered["added_tokens"][0] | {"id": 7592, "content": "hello world"}
    ),
    "ideographs within words": lambda altered: altered["normalizer"].update(handle_chinese_chars=False),
    "a letter that continues no word": lambda altered: altered["model"]["vocab"].update(
        {"\u2603": len(altered["model"]["vocab"])}
    ),
}


@pytest.fixture(params=ALTERATIONS)
def another(request: pytest.FixtureRequest, tokenizer_file: Path, tmp_path: Path) -> Path:
    """The file of a tokenizer that differs from BERT's in one point."""
    return changed_file(tokenizer_file, tmp_path, ALTERATIONS[request.param])


def test_another_tokenizer_is_given_the_whole_of_usual_texts(another: Path) -> None:
    whole_text = whole_text_tokenizer(another)
    text = "hello world and\n\u00c9cole " * 300
    tokens = Tokens(another)
    special = whole_text.encode("").ids
    assert ids_of(tokens, [text, ""]) == [whole_text.encode(text).ids[:MAX_TOKENS], special]
    (both_ends,), inner = ids_of(tokens, [text], 96, keep_end=True), whole_text.encode(text, add_special_tokens=False).ids
    half = (96 - len(special)) // 2
    assert [each for each in both_ends if each not in special] == inner[:half] + inner[-half:]


@pytest.mark.parametrize("text", [COSTLY_TEXTS["words of 99 letters"], COSTLY_TEXTS["spaces"], COSTLY_TEXTS["one word"]])
def test_another_tokenizer_is_given_a_bounded_part_of_any_text(another: Path, text: str) -> None:
    tokens = Tokens(another)
    for most, keep_end in ((MAX_TOKENS, False), (256, True), (96, True)):
        assert chars_tokenised(tokens, text, most, keep_end) <= 16 * most + 1


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}", "utf-8")
    with pytest.raises(SettingsError, match=r"^embedding\.model: .*tokenizer\.json cannot be loaded"):
        Tokens(broken)


@pytest.mark.parametrize("template", [[0, 1, 2], [0, 1], [1, 2], [1]], ids=["both", "opening", "closing", "none"])
def test_a_text_keeps_its_closing_tokens_and_its_prompt_as_the_tokenizer_truncates(
    tokenizer_file: Path, tmp_path: Path, template: list[int]
) -> None:
    def shorten(description: Description) -> None:
        processor = description["post_processor"]
        processor["single"] = [processor["single"][index] for index in template]

    file = changed_file(tokenizer_file, tmp_path, shorten)
    expected = Tokenizer.from_file(str(file))
    expected.no_padding()
    expected.enable_truncation(20)
    tokens = Tokens(file, 20, "find: ", keeps_closing=True)
    for words in (0, 1, 15, 16, 17, 18, 19, 500):
        text = "tree " * words
        assert ids_of(tokens, [text]) == [expected.encode(f"find: {text}").ids]
    (both_ends,) = ids_of(tokens, ["tree " * 50 + "leaf"], 12, keep_end=True)
    special = len(template) - 1
    inner = expected.encode("find: tree tree tree tree tree tree leaf", add_special_tokens=False).ids
    half = (12 - special) // 2
    opening = expected.encode("").ids[: 0 in template]
    assert both_ends[len(opening) :][: 2 * half] == inner[:half] + [inner[2]] * (half - 1) + inner[-1:]
