"""What `kp-scorer doctor` finds, and what it says to do about it."""

import json
from pathlib import Path
from typing import Any

import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import declare_queues
from kp_scorer.broker.queues import submission_queues
from kp_scorer.settings import Settings, as_environment

from tests.support.commands import run
from tests.support.rabbitmq import RabbitMQ
from tests.support.servers import RedisServer


def diagnosed(settings: Settings, *options: str, **variables: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code of `doctor`, and its findings by what was looked at."""
    done = run("doctor", "--set", "embedding.embedder=none", *options, **as_environment(settings), **variables)
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        found.setdefault(row["check"], []).append(row)
        assert row["detail"] in done.stderr
    return done.returncode, found


def test_what_is_wrong_is_named_with_the_remedy(settings: Settings, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.connect() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
        client.config_set("maxmemory", 10**9)
        client.lpush("decisions.accepted", *["{}"] * 9)
        elsewhere = settings.model_copy(update={"redis": settings.redis.model_copy(update={"url": server.url})})
        elsewhere = elsewhere.model_copy(update={"broker": settings.broker.model_copy(update={"url": server.url})})
        code, found = diagnosed(
            elsewhere, "--set", "queues.results_limit=10", "--set", "ledger.resend_after_s=30", CELERY_BROKER_URL="redis://x"
        )
        assert code == 1
        wrong = {check: [row["detail"] for row in rows if row["state"] == "wrong"] for check, rows in found.items()}
        assert [detail.partition(": set ")[2] for detail in wrong["redis"]] == ["maxmemory-policy noeviction", "appendonly yes"]
        assert "9 unread decisions of 10" in wrong["queues"][0]
        assert "ledger.resend_after_s" in wrong["settings"][0]
        assert "CELERY_BROKER_URL" in found["variables"][0]["detail"]
        assert found["clocks"] == [{"check": "clocks", "state": "ok", "detail": "in order"}]
        assert [row["state"] for row in found["workers"] + found["embedder"]] == ["advice", "advice"]
        server.kill()
        code, found = diagnosed(elsewhere)
        assert code == 1
        assert found["redis"][0]["state"] == found["queues"][0]["state"] == "wrong"
        server.start()


def test_where_nothing_is_wrong_it_says_so_and_converts_no_model(
    settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    redis_client.config_set("maxmemory", 10**9)
    code, found = diagnosed(settings, "--set", "embedding.embedder=openvino", XDG_CACHE_HOME=str(tmp_path))
    redis_client.config_set("maxmemory", 0)
    assert code == 0
    assert {row["state"] for rows in found.values() for row in rows} <= {"ok", "advice"}
    (embedder,) = found["embedder"]
    assert embedder["state"] == "advice"
    assert "not converted yet" in embedder["detail"]
    assert not list(tmp_path.iterdir())


def test_queues_that_are_missing_or_have_other_arguments_are_named_and_none_is_made(rabbitmq: RabbitMQ) -> None:
    settings = rabbitmq.settings()
    for _ in range(2):
        _, found = diagnosed(settings)
        assert {row["state"] for row in found["queues"]} == {"advice"}
        assert len(found["queues"]) == 5
    queues = submission_queues(rabbitmq.settings(broker__delivery_limit=7))
    with make_celery(settings) as app:
        declare_queues(app, queues.in_order)
    code, found = diagnosed(settings)
    assert code == 1
    (detail,) = [row["detail"] for row in found["queues"] if row["state"] == "wrong"]
    assert "x-delivery-limit" in detail
