"""The worker's Celery app: ``celery -A worker.app worker``, or ``kp-scorer worker``."""

from celery import Celery

from worker.broker import largest_message_bytes, make_celery
from worker.consumer import keeping_consumer
from worker.embedded import with_endpoints
from worker.embedding import select_embedder
from worker.lifecycle import Lifecycle, LoadEmbedder
from worker.settings import Settings, load_settings
from worker.tasks import register


def create_app(settings: Settings, load_embedder: LoadEmbedder = select_embedder) -> Celery:
    """Make the app with its task and its lifecycle; ``load_embedder`` is called once, when a worker starts."""
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


def __getattr__(name: str) -> Celery:
    """Make ``app`` when Celery asks for it, so that merely importing this module reads no environment and no file."""
    if name != "app":
        raise AttributeError(name)
    app = create_app(with_endpoints(load_settings()))
    globals()["app"] = app
    return app
