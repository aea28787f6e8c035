"""Where the broker and the store are, when the settings leave that open."""

from kp_scorer.errors import SettingsError
from kp_scorer.settings import Settings
from kp_scorer.store.local_redis import running_url


def with_endpoints(settings: Settings) -> Settings:
    """Fill in what the settings leave open: one Redis serves as broker and store, else the embedded one that runs.

    Raises:
        SettingsError: nothing is configured and no embedded Redis runs, or only a broker that is not Redis is named, or only
            the socket of a Redis.
    """
    broker, store = settings.broker.url, settings.redis.url
    if not broker and not store:
        broker = store = running_url()
        if not store:
            raise SettingsError(
                "broker.url: no broker is configured and no embedded one is running; "
                "start one with `kp-scorer up`, or set KP_BROKER_URL and KP_REDIS_URL"
            )
    if not broker and settings.redis.server().scheme == "unix":
        raise SettingsError("broker.url: a broker is reached by TCP only, not by the socket of redis.url; set KP_BROKER_URL")
    if not store and not settings.broker.is_redis:
        raise SettingsError("redis.url: the novelty log and the ledger need a Redis beside this broker; set KP_REDIS_URL")
    return settings.model_copy(
        update={
            "broker": settings.broker.model_copy(update={"url": broker or store}),
            "redis": settings.redis.model_copy(update={"url": store or broker}),
        }
    )
