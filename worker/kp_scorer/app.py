"""The worker's Celery app: ``celery -A kp_scorer.app worker``, or ``kp-scorer worker``."""

from functools import partial

from celery import Celery

from kp_scorer.broker.celery_app import make_celery, remove_celery_variables
from kp_scorer.embedding import select_embedder
from kp_scorer.logs import configure_logs
from kp_scorer.process.consumer import KeepingConsumer
from kp_scorer.process.lifecycle import Lifecycle
from kp_scorer.process.runtime import LoadEmbedder
from kp_scorer.process.tasks import register
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store.endpoints import with_endpoints


def create_app(settings: Settings, load_embedder: LoadEmbedder = select_embedder) -> Celery:
    """Make the app with its task and its lifecycle; ``load_embedder`` is called once, when a worker starts."""
    app = make_celery(settings)
    lifecycle = Lifecycle(app, settings, load_embedder)
    app.conf.worker_consumer = partial(KeepingConsumer, lifecycle=lifecycle, settings=settings)
    register(app)
    # Celery's own tasks would consume a message that names one; unregistered, the message becomes a dead letter.
    app.finalize()
    for name in [name for name in app.tasks if name.startswith("celery.")]:
        app.tasks.unregister(name)
    return app


def __getattr__(name: str) -> Celery:
    """Make ``app`` when Celery asks for it, so that importing this module reads no environment and no file."""
    if name != "app":
        raise AttributeError(name)
    settings = with_endpoints(load_settings())
    configure_logs(settings.log)
    remove_celery_variables()
    app = create_app(settings)
    globals()["app"] = app
    return app
