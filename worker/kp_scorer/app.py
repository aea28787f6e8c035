"""The worker's Celery app: ``celery -A kp_scorer.app worker``, or ``kp-scorer worker``."""

import json
from functools import partial
from typing import Any

import kombu.utils.json
from celery import Celery
from kombu.serialization import register as register_serializer

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.embedding import select_embedder
from kp_scorer.process.consumer import KeepingConsumer
from kp_scorer.process.lifecycle import Lifecycle
from kp_scorer.process.runtime import LoadEmbedder
from kp_scorer.process.tasks import register
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store.endpoints import with_endpoints


def create_app(settings: Settings, load_embedder: LoadEmbedder = select_embedder) -> Celery:
    """Make the app with its task and its lifecycle; ``load_embedder`` is called once, when a worker starts."""
    # Kombu's decoder turns objects with a "__type__", which a trace may contain, into dates and the like, or refuses them.
    register_serializer("json", kombu.utils.json.dumps, _loads, "application/json", "utf-8")
    app = make_celery(settings)
    lifecycle = Lifecycle(app, settings, load_embedder)
    app.conf.worker_consumer = partial(KeepingConsumer, lifecycle=lifecycle, settings=settings)
    register(app, lifecycle, settings.worker)
    # Celery's own tasks would consume a message that names one; unregistered, the message becomes a dead letter.
    app.finalize()
    for name in [name for name in app.tasks if name.startswith("celery.")]:
        app.tasks.unregister(name)
    return app


def _loads(body: str | bytes) -> Any:
    # Given bytes, json would also accept UTF-16 and UTF-32.
    return json.loads(body if isinstance(body, str) else bytes(body).decode("utf-8"))


def __getattr__(name: str) -> Celery:
    """Make ``app`` when Celery asks for it, so that importing this module reads no environment and no file."""
    if name != "app":
        raise AttributeError(name)
    app = create_app(with_endpoints(load_settings()))
    globals()["app"] = app
    return app
