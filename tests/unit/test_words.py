"""The embedder without a model gives equal words equal vectors on every machine and in any script, at a bounded cost."""

import time
import unicodedata
from itertools import pairwise
from math import log, sqrt
from random import Random
from typing import Final, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.embedding.embedder import RECIPES, Vector
from kp_scorer.settings.sections import RecipeName

from tests.support.builders import load_embedder, make_trace, step
from tests.support.calls import traced_memory
from tests.support.costly import COSTLY_TEXTS

WORDS: Final = load_embedder(embedder="words")

PLACES: Final = {
    "refund": (57, 1),
    "strasse": (277, 1),
    "привет": (283, -1),
    "日": (213, 1),
    "日本": (372, 1),
    "ไท": (154, 1),
    "42": (43, -1),
    "_": (296, -1),
}
"""The dimension and the sign of each word.

If they changed, the space would need another name, so that no different vectors are compared.
"""

UNRELATED: Final = {
    "English": ("book the cheapest flight", "water every plant indoors"),
    "Hindi": ("सबसे सस्ती उड़ान बुक करें", "पौधों को रोज़ पानी दो"),
    "Tamil": ("மலிவான விமானத்தை முன்பதிவு செய்", "தினமும் செடிகளுக்கு தண்ணீர் ஊற்று"),
    "Japanese": ("最も安い航空券を予約して", "毎日植物に水をやる"),
    "Chinese": ("预订最便宜的航班", "每天给植物浇水"),
    "Thai": ("จองตั๋วราคาถูกที่สุด", "รดน้ำต้นไม้ทุกวัน"),
    "Korean": ("가장 저렴한 항공편 예약", "매일 식물에 물 주기"),
}

TEXTS: Final = st.text(max_size=200)


def vector_of(text: str) -> Vector:
    (vector,) = WORDS.embed([text])
    return np.asarray(vector)


def similarity(first: str, second: str) -> float:
    return float(vector_of(first) @ vector_of(second))


@pytest.mark.parametrize("word", PLACES)
def test_a_word_has_the_same_place_and_sign_for_ever(word: str) -> None:
    place, sign = PLACES[word]
    expected = np.zeros(384, np.float32)
    expected[place] = sign
    np.testing.assert_array_equal(vector_of(word), expected)
    assert WORDS.space == "words-3.asked_and_did.1"


def test_asked_counts_six_tenths_and_did_four_and_a_word_that_repeats_its_logarithm() -> None:
    trace = make_trace(
        objective="Refund!", steps=[step("observation", content="_"), step("tool_call", "sql", content="42 42 日本 42")]
    )
    vector = vector_of(WORDS.recipe.text(trace))
    did = np.array([-(1 + log(3)), 1]) / sqrt((1 + log(3)) ** 2 + 1)
    expected = np.array([0.6, *(0.4 * did)]) / sqrt(0.6**2 + 0.4**2)
    np.testing.assert_allclose(vector[[57, 43, 372]], expected, atol=1e-6)
    assert np.count_nonzero(vector) == 3


@given(st.lists(TEXTS, max_size=4))
def test_every_text_has_a_float32_vector_of_length_1(texts: list[str]) -> None:
    vectors = WORDS.embed(texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(texts), 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("text", ["", "\x1e", " !? \x1e ... ", "\x1e\x1e"])
def test_a_text_without_words_has_the_first_unit_vector(text: str) -> None:
    np.testing.assert_array_equal(vector_of(text), np.eye(1, 384, dtype=np.float32)[0])


def test_a_passage_without_words_counts_nothing() -> None:
    assert similarity("refund\x1e!", "refund") == similarity("\x1erefund", "refund") == 1


def test_words_that_cancel_each_other_leave_a_vector() -> None:
    words = map(str, range(10_000))
    opposite = next(word for word in words if np.array_equal(vector_of(word), -vector_of("refund")))
    assert np.linalg.norm(vector_of(f"refund {opposite}")) == 1
    assert similarity(f"refund {opposite} sql", "sql") == 1


@given(st.lists(st.sampled_from(["a", "B", "42", "日本", "ß"]), min_size=1), st.randoms())
def test_order_case_and_punctuation_do_not_count(words: list[str], random: Random) -> None:
    shuffled = random.sample(words, len(words))
    assert similarity(" ".join(words), ", ".join(shuffled).upper()) == pytest.approx(1)


@pytest.mark.parametrize("text", [*(text for texts in UNRELATED.values() for text in texts), "Größe: 10 µm, Ångström", "שלום"])
@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_a_text_has_the_same_vector_in_every_normal_form(text: str, form: Literal["NFC", "NFD", "NFKC", "NFKD"]) -> None:
    assert similarity(text, unicodedata.normalize(form, text)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("written", "otherwise"),
    [
        ("book a flight", "bo\u200bok\u2060 a fli\u00adght\ufe0f"),
        ("book a flight", "bo\ufff9ok\u2800a fli\ufffbght"),
        ("book a flight", "\uff42\uff4f\uff4f\uff4b \uff41 \uff46\uff4c\uff49\uff47\uff48\uff54"),
        ("كتاب الرجل", "كِتَابُ الرَّجُلِ"),
        ("كتاب الرجل", "كتــاب الرجـــل"),
        ("שלום עולם", "שָׁלוֹם עוֹלָם"),
        ("résumé", "resume"),
        ("カタカナガ", "ｶﾀｶﾅｶﾞ"),
    ],
)
def test_width_optional_marks_and_invisible_characters_do_not_count(written: str, otherwise: str) -> None:
    assert similarity(written, otherwise) == pytest.approx(1)


def test_marks_count_if_they_make_another_word() -> None:
    assert similarity("น้ำ", "นำ") < 0.5  # water, to lead
    assert similarity("कल", "किला") < 0.5  # tomorrow, a fort


@pytest.mark.parametrize("language", UNRELATED)
def test_texts_that_share_no_word_are_unlike_in_every_language(language: str) -> None:
    first, second = UNRELATED[language]
    assert abs(similarity(first, second)) < 0.25
    assert similarity(first, f"{first} {second}") > 0.5


def test_scripts_without_spaces_are_read_in_pairs_among_words_of_others() -> None:
    pairs = [first + second for first, second in pairwise("最安航空券")]
    assert similarity("JALの最安航空券を3枚", " ".join(["JAL", "の最", *pairs, "券を", "3", "枚"])) == pytest.approx(1)


def test_every_word_of_a_long_trace_counts() -> None:
    filler = "tree " * 20_000
    assert similarity(f"book a flight\x1e{filler} refund", f"book a flight\x1e{filler} parcel") < 1 - 1e-3


@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(text, id=name) for name, text in COSTLY_TEXTS.items()),
        pytest.param(" ".join(f"{number:x}" for number in range(170_000)), id="different words"),
        pytest.param("".join(map(chr, np.random.default_rng(1).integers(0x4E00, 0x9FFF, 330_000))), id="different pairs"),
    ],
)
def test_no_text_of_a_megabyte_costs_much_time_or_memory(text: str) -> None:
    started = time.process_time()
    with traced_memory() as memory:
        assert np.linalg.norm(vector_of(f"\x1e{text}")) == pytest.approx(1)
    # This is ten times what it takes with memory traced, because other tests run beside this one.
    assert time.process_time() - started < 10
    assert memory.peak_bytes < 64e6
    assert memory.held_bytes < 8e6


def test_memory_of_remembered_words_is_bounded() -> None:
    fresh = load_embedder(embedder="words")
    with traced_memory() as memory:
        # The letters take four bytes each, and the words are more than the embedder remembers.
        for start in range(0, 60_000, 20_000):
            fresh.embed([" ".join("\U00010428" * 58 + str(number) for number in range(start, start + 20_000))])
    assert memory.held_bytes < 16e6


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_words_embedder_has_its_own_recipe_whatever_the_settings_say(recipe: RecipeName) -> None:
    selected = load_embedder(recipe, embedder="words")
    assert selected.recipe is RECIPES["asked_and_did"]
    assert selected.space == WORDS.space
