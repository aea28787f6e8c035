"""The worker's Celery app: ``celery -A kp_scorer.app worker``, or ``kp-scorer worker``."""

from functools import partial

from celery import Celery

from kp_scorer.broker.celery_app import make_celery, remove_celery_variables
from kp_scorer.embedding.select import select_embedder
from kp_scorer.endpoints import with_endpoints
from kp_scorer.logs import configure_logs
from kp_scorer.process.consumer import KeepingConsumer
from kp_scorer.process.runtime import Runtime
from kp_scorer.process.startup import LoadEmbedder
from kp_scorer.settings import Settings, load_settings


def create_app(settings: Settings, load_embedder: LoadEmbedder = select_embedder) -> Celery:
    """Make the Celery app of a worker in this process; the worker calls ``load_embedder`` once, as it starts."""
    # Celery sets up logging only after worker_init, and earlier events must be logged, too.
    configure_logs(settings.log, in_background=True)
    remove_celery_variables()
    app = make_celery(settings)
    runtime = Runtime(app, settings, load_embedder)
    queues = list(settings.queues.traces)
    app.conf.worker_consumer = partial(KeepingConsumer, runtime=runtime, limits=settings.limits, queues=queues)
    return app


def __getattr__(name: str) -> Celery:
    """Make ``app`` when Celery asks for it, so that importing this module reads no environment and no file."""
    if name != "app":
        raise AttributeError(name)
    app = globals()["app"] = create_app(with_endpoints(load_settings()))
    return app
