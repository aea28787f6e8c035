"""The worker's Celery app: ``celery -A worker.app worker``, or ``kp-scorer worker``."""

import json
from typing import Any

import kombu.utils.json
from celery import Celery
from kombu.serialization import register as register_serializer

from worker.broker import largest_message_bytes, make_celery
from worker.consumer import keeping_consumer
from worker.embedded import with_endpoints
from worker.embedding import select_embedder
from worker.lifecycle import Lifecycle, LoadEmbedder
from worker.settings import Settings, load_settings
from worker.tasks import register


def create_app(settings: Settings, load_embedder: LoadEmbedder = select_embedder) -> Celery:
    """Make the app with its task and its lifecycle; ``load_embedder`` is called once, when a worker starts."""
    # By itself kombu makes dates and the like of objects with a "__type__", which a trace may hold, and refuses the others.
    register_serializer("json", kombu.utils.json.dumps, _loads, "application/json", "utf-8")
    app = make_celery(settings)
    lifecycle = Lifecycle(app, settings, load_embedder)
    app.conf.worker_consumer = keeping_consumer(
        lambda: lifecycle.scorer, settings.broker.delivery_limit, largest_message_bytes(settings)
    )
    register(app, lifecycle, settings.worker)
    # Celery's own tasks would swallow a message that names one; as unknown tasks their messages are kept.
    app.finalize()
    for name in [name for name in app.tasks if name.startswith("celery.")]:
        app.tasks.unregister(name)
    return app


def _loads(body: str | bytes) -> Any:
    # Left to itself, json would also take UTF-16 and UTF-32.
    return json.loads(body if isinstance(body, str) else bytes(body).decode("utf-8"))


def __getattr__(name: str) -> Celery:
    """Make ``app`` when Celery asks for it, so that merely importing this module reads no environment and no file."""
    if name != "app":
        raise AttributeError(name)
    app = create_app(with_endpoints(load_settings()))
    globals()["app"] = app
    return app
