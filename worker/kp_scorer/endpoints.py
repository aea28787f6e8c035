"""Determines the servers that commands and clients use.

It is not part of ``local``, because `kp-scorer health` looks for the embedded Redis without loading the settings.
"""

from kp_scorer.errors import SettingsError
from kp_scorer.local.embedded_redis import running
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import filled_in


def with_endpoints(settings: Settings) -> Settings:
    """Return settings with all URLs: a single Redis is both broker and store; if no URL is set, the running embedded Redis is.

    With the embedded Redis, settings that are not set here are those of `up`, because other thresholds or names of queues would
    mislead. Raises SettingsError if a server is missing.
    """
    if not settings.broker.url and not settings.redis.url:
        embedded = running()
        if embedded is None:
            raise SettingsError(
                "broker.url: no broker is configured and no embedded one is running; "
                "start one with `kp-scorer up`, or set KP_BROKER_URL and KP_REDIS_URL"
            )
        redis = {**embedded.settings.get("redis", {}), "url": embedded.url}
        settings = filled_in(settings, {**embedded.settings, "redis": redis})
    broker, store = settings.broker, settings.redis
    if not store.url and not broker.is_redis:
        raise SettingsError("redis.url: the novelty log and the ledger need a Redis beside this broker; set KP_REDIS_URL")
    return settings.model_copy(
        update={"broker": broker if broker.url else broker.at(store), "redis": store if store.url else store.at(broker)}
    )
