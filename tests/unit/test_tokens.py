"""Cutting a text before it is tokenised never changes an id; the installed model's own tokenizer, and one of another kind."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kp_scorer.embedding import MAX_TOKENS
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.tokens import Tokens
from kp_scorer.errors import SettingsError
from tokenizers import Tokenizer

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


@pytest.fixture(scope="module")
def tokenizer_file() -> Path:
    model = find_model("")
    assert model
    return model.tokenizer


@pytest.fixture(scope="module")
def reference(tokenizer_file: Path) -> Tokenizer:
    """What the reference does: the whole text, special tokens included, then the cut."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.fixture(scope="module", params=[1, 7, 100])
def in_pieces(tokenizer_file: Path, request: pytest.FixtureRequest) -> Tokens:
    return Tokens(tokenizer_file, piece_chars=request.param)


@given(texts=st.lists(TEXTS, max_size=4))
@example(texts=[" " * 5_000 + "word", "", "x" * 5_000, "中" * 1_500])
def test_pieces_give_the_ids_of_the_whole_text(in_pieces: Tokens, reference: Tokenizer, texts: list[str]) -> None:
    assert in_pieces.of(texts) == [reference.encode(text).ids[:MAX_TOKENS] for text in texts]


@given(text=TEXTS, times=st.integers(20, 400))
def test_long_texts_are_cut_where_the_reference_cuts(tokenizer_file: Path, reference: Tokenizer, text: str, times: int) -> None:
    long = f"{text} " * times
    assert Tokens(tokenizer_file).of([long]) == [reference.encode(long).ids[:MAX_TOKENS]]


@pytest.mark.parametrize("words", [509, 510, 511, 512])
def test_a_text_that_is_too_long_loses_its_closing_token(tokenizer_file: Path, words: int) -> None:
    (ids,) = Tokens(tokenizer_file).of(["tree " * words])
    assert len(ids) == min(words + 2, MAX_TOKENS)
    assert (ids[-1] == ids_of_separator(tokenizer_file)) == (words <= 510)


def test_text_behind_the_last_token_that_counts_is_not_tokenised(tokenizer_file: Path) -> None:
    # It could not be: a lone surrogate is no text to the tokenizer.
    (ids,) = Tokens(tokenizer_file).of(["tree " * 2_000 + "\ud800"])
    assert len(ids) == MAX_TOKENS
    with pytest.raises(TypeError):
        Tokens(tokenizer_file).of(["tree \ud800"])


@pytest.mark.parametrize(
    "change", ["no BERT normalizer", "no word pieces", "an added token with a space", "one token in front"]
)
def test_a_tokenizer_that_cannot_be_cut_is_given_whole_texts(tokenizer_file: Path, tmp_path: Path, change: str) -> None:
    description = json.loads(tokenizer_file.read_text("utf-8"))
    if change == "no BERT normalizer":
        description["normalizer"] = {"type": "Lowercase"}
    elif change == "no word pieces":
        description["model"] = {"type": "WordLevel", "vocab": description["model"]["vocab"], "unk_token": "[UNK]"}
    elif change == "an added token with a space":
        description["added_tokens"].append(description["added_tokens"][0] | {"id": 7592, "content": "hello world"})
    else:
        description["post_processor"]["single"] = description["post_processor"]["single"][:2]
    changed = tmp_path / "tokenizer.json"
    changed.write_text(json.dumps(description), "utf-8")
    whole = Tokenizer.from_file(str(changed))
    whole.no_truncation()
    whole.no_padding()
    text = "hello world and\nÉcole " * 300
    assert Tokens(changed, piece_chars=8).of([text, ""]) == [whole.encode(text).ids[:MAX_TOKENS], whole.encode("").ids]


@given(texts=st.lists(TEXTS, max_size=4), most=st.sampled_from([8, 20, 96]))
@example(texts=[" " * 5_000 + "word", "", "x" * 5_000, "中" * 1_500, "tree " * 18, "tree " * 19], most=20)
def test_both_ends_are_those_of_the_whole_text(in_pieces: Tokens, reference: Tokenizer, texts: list[str], most: int) -> None:
    for text, ids in zip(texts, in_pieces.of(texts, most, keep_end=True), strict=True):
        opening, *said, closing = reference.encode(text).ids
        half = (most - 2) // 2
        assert ids == [opening, *(said if len(said) <= 2 * half else said[:half] + said[-half:]), closing]


def test_what_lies_between_both_ends_is_not_tokenised(tokenizer_file: Path) -> None:
    text = "tree " * 2_000 + "\ud800 " + "leaf " * 2_000
    (ids,) = Tokens(tokenizer_file).of([text], 96, keep_end=True)
    assert len(ids) == 96


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}", "utf-8")
    with pytest.raises(SettingsError, match=r"^embedding\.model: .*tokenizer\.json cannot be loaded"):
        Tokens(broken)


def ids_of_separator(tokenizer_file: Path) -> int:
    found = Tokenizer.from_file(str(tokenizer_file)).token_to_id("[SEP]")
    assert found is not None
    return found


def test_a_tokenizer_without_special_tokens_ends_too(tokenizer_file: Path, tmp_path: Path) -> None:
    description = json.loads(tokenizer_file.read_text("utf-8")) | {"post_processor": None}
    plain = tmp_path / "tokenizer.json"
    plain.write_text(json.dumps(description), "utf-8")
    nothing, all_of_it = Tokens(plain).of(["", "tree " * 9], 8, keep_end=True)
    assert nothing == []
    assert len(all_of_it) == 8
