"""The decisions of a ledger, for whoever wants to look at all of them."""

from collections.abc import Iterator

from kp_scorer.decision import Decision
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store.endpoints import with_endpoints
from kp_scorer.store.store import Store


def stored_decisions(settings: Settings | None = None) -> Iterator[Decision]:
    """Yield every decision that the ledger holds, in no order. One made meanwhile may be missing; none comes twice.

    Args:
        settings: where the ledger is; by default what the environment and the configuration file say.

    Raises:
        SettingsError: a setting is wrong, or nothing says where Redis is.
        ServiceUnavailable: Redis cannot be reached.
    """
    with Store.open(with_endpoints(settings or load_settings())) as store:
        for found in store.ledger.all_decided():
            yield found.decision
