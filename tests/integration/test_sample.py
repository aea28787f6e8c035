"""Sampled decisions go to review as well as to the queue of their outcome, even where one of the queues is full."""

from collections.abc import Iterable
from typing import Final

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.decision import Decision, Outcome
from kp_scorer.errors import ScorerError, ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.spans.context import NO_CONTEXT
from kp_scorer.store import Store

from tests.support.builders import decision
from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.outcomes import published

ACCEPTED, REVIEW = (decision(f"kp:trace:{outcome}", outcome=outcome, sampled=0.5) for outcome in ("accepted", "review"))
OTHER: Final = decision("kp:trace:other", outcome="rejected")


def ids_in(settings: Settings, outcome: Outcome) -> list[str]:
    return [each["trace_id"] for each in published(settings, outcome)]


class Attempts:
    """A worker's attempts to publish decisions. Each attempt leaves out those that an earlier one has published."""

    def __init__(self, publisher: Publisher, decisions: Iterable[Decision]) -> None:
        self._publisher = publisher
        self._waiting = [(each, set[str]()) for each in decisions]

    def publish(self) -> list[ScorerError]:
        publications = [self._publisher.publication(each, NO_CONTEXT, None, names) for each, names in self._waiting]
        errors = self._publisher.publish_all(publications)
        self._waiting = [each for each, error in zip(self._waiting, errors, strict=True) if error]
        return [error for error in errors if error]


def test_a_sampled_decision_goes_where_its_outcome_goes_if_review_is_not_published(settings: Settings, store: Store) -> None:
    unpublished = with_changed(settings, review__sample=0.5, results__publish=["accepted"])
    with make_celery(unpublished) as app:
        publisher = Publisher(app, unpublished, store)
        assert Attempts(publisher, [ACCEPTED, REVIEW]).publish() == []
        assert publisher.destination(REVIEW) is None
        assert publisher.destination(ACCEPTED) == ("redis", "decisions.accepted")
    assert ids_in(unpublished, "accepted") == [ACCEPTED.trace_id]


@pytest.mark.parametrize("full", ["review", "accepted"])
def test_a_sampled_decision_waits_while_either_queue_is_full_and_leaves_no_copies(
    on_broker: SettingsWith, full: Outcome
) -> None:
    settings = on_broker(review__sample=0.5, queues__results_limit=3)
    filling = [decision(f"kp:trace:filling-{number}", outcome=full) for number in range(5)]
    with make_celery(settings) as app, Store.open(settings) as store:
        publisher = Publisher(app, settings, store)
        filled = len(filling) - len(Attempts(publisher, filling).publish())
        attempts = Attempts(publisher, [ACCEPTED, OTHER])
        for _ in range(3):
            (error,) = attempts.publish()
            assert isinstance(error, ServiceUnavailable)
            assert f"{settings.queues.name(full)} is full of unread decisions" in str(error)
        # A decision must not be readable elsewhere while it still waits for room in the queue for review.
        waits_for_review = full == "review"
        assert (ids_in(settings, "accepted") if waits_for_review else ids_in(settings, "review")) == (
            [] if waits_for_review else [ACCEPTED.trace_id]
        )
        assert len(ids_in(settings, full)) == filled
        assert attempts.publish() == []
    assert ids_in(settings, "accepted") == [ACCEPTED.trace_id]
    assert ids_in(settings, "review") == ([ACCEPTED.trace_id] if waits_for_review else [])
    assert ids_in(settings, "rejected") == [OTHER.trace_id]
