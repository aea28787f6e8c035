"""Settings: read once at start from flags, ``KP_…`` variables, a TOML file and these defaults, the first of which wins."""

from kp_scorer.settings.loading import as_environment, config_file, filled_in, load_scoring, load_settings
from kp_scorer.settings.sections import (
    PIN_NAME,
    BrokerSettings,
    ChecksSettings,
    EmbeddingSettings,
    LedgerSettings,
    LogSettings,
    MetricsSettings,
    NoveltySettings,
    QueueSettings,
    RecipeName,
    RedisSettings,
    ScoringSettings,
    ServeSettings,
    Settings,
    WorkerSettings,
)

__all__ = [
    "PIN_NAME",
    "BrokerSettings",
    "ChecksSettings",
    "EmbeddingSettings",
    "LedgerSettings",
    "LogSettings",
    "MetricsSettings",
    "NoveltySettings",
    "QueueSettings",
    "RecipeName",
    "RedisSettings",
    "ScoringSettings",
    "ServeSettings",
    "Settings",
    "WorkerSettings",
    "as_environment",
    "config_file",
    "filled_in",
    "load_scoring",
    "load_settings",
]
