"""Who is at fault when a text cannot be embedded: the text, or the embedder."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pytest
from kp_scorer.embedding import TRACE, CheckedEmbedder
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.errors import EmbedderSick, ServiceUnavailable

BAD: Final = "bad"


class Embedder:
    """The first unit vector for every text, unless it is told to fail."""

    name, engine, space, dimensions = "one", "python", "one-1", 4
    recipe = TRACE
    tokens_embedded = 0

    def __init__(self, fails_at: Callable[[str], bool] = BAD.__eq__, instead: Vectors | None = None) -> None:
        self.fails_at = fails_at
        self.instead = instead
        self.calls = 0
        self.last = ""

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.calls += 1
        self.last = texts[-1]
        vectors = np.tile(np.eye(1, 4, dtype=np.float32), (len(texts), 1))
        if not any(map(self.fails_at, texts)):
            return vectors
        if self.instead is None:
            raise RuntimeError("out of order")
        return np.tile(self.instead, (len(texts), 1))


def fails(checked: CheckedEmbedder, *texts: str, again: bool = False) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one it is says the caller
        checked.embed(texts, again=again)
    return caught.value


def fails_as_batch(checked: CheckedEmbedder, count: int) -> list[Exception]:
    """Embed a batch that fails, then its members one by one, as the batcher does."""
    return [fails(checked, *[BAD] * count), *(fails(checked, BAD, again=True) for _ in range(count))]


def test_good_texts_get_their_vectors() -> None:
    assert CheckedEmbedder(Embedder()).embed(["a", "b"]).shape == (2, 4)


def test_a_text_that_fails_alone_while_the_probe_passes_is_to_blame() -> None:
    checked = CheckedEmbedder(Embedder())
    assert isinstance(fails(checked, "good", BAD), RuntimeError)
    assert isinstance(fails(checked, BAD, again=True), RuntimeError)
    assert len(checked.embed(["good"], again=True)) == 1


def test_an_embedder_that_fails_at_the_probe_is_sick_and_is_not_asked_again() -> None:
    embedder = Embedder(lambda text: True)
    checked = CheckedEmbedder(embedder)
    assert not isinstance(fails(checked, "a", "b"), EmbedderSick)
    assert isinstance(fails(checked, "a", again=True), EmbedderSick)
    calls = embedder.calls
    assert isinstance(fails(checked, "b", again=True), EmbedderSick)
    assert isinstance(fails(checked, "c", "d"), EmbedderSick)
    assert embedder.calls == calls


@pytest.mark.parametrize(
    "instead",
    [
        pytest.param([[np.nan, 0, 0, 0]], id="not a number"),
        pytest.param([[np.inf, 0, 0, 0]], id="infinite"),
        pytest.param([[0.9, 0, 0, 0]], id="short"),
        pytest.param([[0, 0, 0, 0]], id="nothing"),
        pytest.param([[1, 0, 0, 0], [1, 0, 0, 0]], id="too many"),
    ],
)
def test_vectors_that_are_none_are_a_failure(instead: list[list[float]]) -> None:
    bad = np.array(instead, np.float32)
    assert isinstance(fails(CheckedEmbedder(Embedder(instead=bad)), "good", BAD), FloatingPointError)
    assert isinstance(fails(CheckedEmbedder(Embedder(lambda text: True, bad)), "good"), EmbedderSick)


def test_vectors_within_the_tolerance_are_taken() -> None:
    assert CheckedEmbedder(Embedder(instead=np.array([[1.009, 0, 0, 0]], np.float32))).embed([BAD]).shape == (1, 4)


def test_batches_in_a_row_of_which_nothing_can_be_embedded_are_the_embedders_fault() -> None:
    checked = CheckedEmbedder(Embedder())
    first, second = fails_as_batch(checked, 3), fails_as_batch(checked, 3)
    assert not any(isinstance(error, EmbedderSick) for error in (*first, *second))
    assert isinstance(fails_as_batch(checked, 3)[-1], EmbedderSick)


def test_single_texts_that_fail_in_a_row_count_as_batches() -> None:
    checked = CheckedEmbedder(Embedder())
    assert [isinstance(fails(checked, BAD), EmbedderSick) for _ in range(3)] == [False, False, True]


def test_one_success_in_between_clears_the_embedder() -> None:
    checked = CheckedEmbedder(Embedder())
    for _ in range(5):
        fails_as_batch(checked, 2)
        checked.embed(["good"])


def test_one_batch_of_bad_texts_is_not_the_embedders_fault() -> None:
    assert not any(isinstance(error, EmbedderSick) for error in fails_as_batch(CheckedEmbedder(Embedder()), 32))


def test_the_probe_is_longer_than_a_model_reads() -> None:
    embedder = Embedder(lambda text: True)
    fails(CheckedEmbedder(embedder), BAD)
    assert len(embedder.last.split()) > 512


def test_to_who_gives_back_a_sick_embedder_is_an_outage() -> None:
    assert issubclass(EmbedderSick, ServiceUnavailable)
    assert EmbedderSick.exit_code == 4
