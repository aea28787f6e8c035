"""A worker's HTTP port answers probes and shows metrics, and `kp-scorer health` reads its answers."""

import json
import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest
from click.testing import CliRunner
from kp_scorer.broker.backlog import Backlog, UnreadDecisions
from kp_scorer.broker.headers import SENT_MS, queued_ms
from kp_scorer.cli.main import commands
from kp_scorer.decision import Decision
from kp_scorer.errors import REASONS, SettingsError
from kp_scorer.monitoring import http_server
from kp_scorer.process.metrics import UNNAMED_DOMAIN, Metrics
from kp_scorer.process.watchdog import VitalThread, Watchdog
from kp_scorer.settings.sections import MetricsSettings
from kp_scorer.store.condition import Condition
from kp_scorer.store.records import SubmissionCounts
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from tests.support.builders import decision_on
from tests.support.processes import free_port, wait_until
from tests.support.prometheus import Samples, exposition, samples_of


@contextmanager
def served(settings: MetricsSettings, live: Sequence[str] = (), ready: Sequence[str] = ()) -> Iterator[str]:
    """Serve probes that give these reasons for not being alive or ready; yield their URL."""
    with http_server(settings, Metrics(()).registry, lambda: live, lambda: ready):
        yield f"http://127.0.0.1:{settings.port}"


@pytest.fixture
def settings() -> MetricsSettings:
    return MetricsSettings(port=free_port())


def asked(*arguments: str, **variables: Any) -> tuple[int, dict[str, Any]]:
    """Run `kp-scorer health`; return its exit code and its answer."""
    done = CliRunner().invoke(commands, ["health", *arguments], env={name: str(value) for name, value in variables.items()})
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("live", "ready", "expected_live", "expected_ready"),
    [
        ([], [], [], []),
        ([], ["redis: it does not answer"], [], ["redis: it does not answer"]),
        (["consumer: stalled"], ["broker: gone"], ["consumer: stalled"], ["consumer: stalled"]),
    ],
)
def test_health_reports_what_the_worker_answers(
    settings: MetricsSettings, live: list[str], ready: list[str], expected_live: list[str], expected_ready: list[str]
) -> None:
    with served(settings, live, ready):
        answer = {"live": not expected_live, "pid": os.getpid(), "reasons": expected_live}
        assert asked(KP_METRICS_PORT=settings.port) == (int(bool(expected_live)), answer)
        answer = {"ready": not expected_ready, "pid": os.getpid(), "reasons": expected_ready}
        assert asked("--ready", "--port", str(settings.port)) == (int(bool(expected_ready)), answer)


def test_health_finds_the_port_in_a_file(settings: MetricsSettings, tmp_path: Path) -> None:
    config = tmp_path / "kp-scorer.toml"
    config.write_text(f'[metrics]\nport = {settings.port}\nhost = "0.0.0.0"\n')
    with served(settings):
        assert asked("--config", str(config))[0] == 0
        assert asked(KP_CONFIG=config)[0] == 0
        assert asked(KP_CONFIG=config, KP_METRICS_PORT=free_port())[0] == 1


def test_health_without_a_worker_fails_with_the_reason(settings: MetricsSettings) -> None:
    reason = f"no worker answers on port {settings.port}: Connection refused"
    assert asked(KP_METRICS_PORT=settings.port) == (1, {"live": False, "pid": None, "reasons": [reason]})


@pytest.mark.parametrize("answer", [b"HTTP/1.0 200 OK\r\n\r\n[]", b"SSH-2.0\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n\xff"])
def test_health_accepts_only_the_answer_of_a_worker(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def reply() -> None:
            with server.accept()[0] as connection:
                connection.recv(1_000)
                connection.sendall(answer)

        Thread(target=reply).start()
        assert asked(KP_METRICS_PORT=port)[1]["reasons"] == [f"the program on port {port} is not a worker"]


@pytest.mark.parametrize(("path", "status"), [("/metrics", 200), ("/livez", 200), ("/readyz", 503), ("/", 404)])
def test_head_gets_the_headers_of_get_and_no_body(settings: MetricsSettings, path: str, status: int) -> None:
    with served(settings, ready=["waits"]), socket.create_connection(("127.0.0.1", settings.port)) as probing:
        probing.sendall(f"HEAD {path} HTTP/1.1\r\n\r\n".encode())
        response = HTTPResponse(probing, method="HEAD")
        response.begin()
        assert response.status == status
        assert (int(response.headers["content-length"]) > 0) == (status != 404)
        assert probing.recv(100) == b""


def test_only_get_of_a_known_path_is_answered(settings: MetricsSettings) -> None:
    with served(settings) as url:
        with pytest.raises(HTTPError, match="404") as refused:
            exposition(f"{url}/")
        refused.value.close()
        with socket.create_connection(("127.0.0.1", settings.port)) as posting:
            posting.sendall(b"POST /livez HTTP/1.0\r\n\r\n")
            assert posting.recv(100).split()[1] == b"501"
        assert "process_cpu_seconds_total" in samples_of(exposition(f"{url}/metrics"))
    with pytest.raises(OSError, match="refused"):
        exposition(f"{url}/metrics")


def test_a_port_in_use_is_logged_and_the_worker_does_without(settings: MetricsSettings) -> None:
    with served(settings), capture_logs() as logs, served(settings, ["another"]):
        assert asked(KP_METRICS_PORT=settings.port)[0] == 0, "the first answers"
    assert [(line["event"], line["port"]) for line in logs] == [("port_in_use", settings.port)]


def test_a_host_that_is_not_of_this_machine_is_refused(settings: MetricsSettings) -> None:
    elsewhere = settings.model_copy(update={"host": "192.0.2.1"})
    with pytest.raises(SettingsError, match=r"metrics\.host"), served(elsewhere):
        pass


def test_a_stalled_part_and_a_dead_thread_are_reasons_to_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watchdog, "_run", lambda _: None)
    watchdog = Watchdog(when_well=lambda: None)
    watchdog.watch("consumer", lambda: 119.0, 120.0)
    assert watchdog.why_not_live() == []
    watchdog.watch("consumer", lambda: 121.0, 120.0)
    dead = VitalThread(lambda _: 1 / 0, "finisher")  # type: ignore[arg-type]
    dead.start()
    returned = VitalThread(lambda _: None, "stage")
    returned.start()
    returned.join()
    watchdog.watch_threads([dead, returned])
    wait_until(lambda: dead.has_died)
    assert watchdog.why_not_live() == ["finisher: the thread has died", "consumer: stalled for 121 of 120 s"]


COUNTS = {"decisions.accepted": 3, "decisions.rejected": 5}
UNREAD = UnreadDecisions(COUNTS, {}, limit=100, most_bytes=0, full=("decisions.rejected",), rings=(), at_s=0.0)
BACKLOG = Backlog(
    {"traces": 0, "traces.search": 90},
    {"traces.search": 0.9},
    UNREAD,
    SubmissionCounts(9, 2, 7, 0),
    7.5,
    {},
    {"redis": Condition(0.5, 3)},
    "",
    {},
)


def decided(domain: str, **changed: Any) -> Decision:
    return Decision.model_validate_json(decision_on("kp:trace:1")).model_copy(update={"domain": domain, **changed})


def samples_from(metrics: Metrics) -> Samples:
    return samples_of(generate_latest(metrics.registry).decode())


def three_published() -> Metrics:
    """Return metrics that have counted an accepted decision of a known domain and two rejected ones of an unknown domain."""
    metrics = Metrics({"code"})
    accepted, rejected = decided("code", outcome="accepted", score=0.8), decided("kp:trace:x\n", outcome="rejected", score=0.2)
    accepted = accepted.model_copy(update={"novelty": accepted.novelty.model_copy(update={"source": "empty_cache"})})
    metrics.count_published(accepted, "traces", queued_s=2.0, in_flight_s=0.1)
    metrics.count_published(rejected, "traces", queued_s=None, in_flight_s=0.1)
    metrics.count_published(rejected, "traces", queued_s=0.0, in_flight_s=0.2)
    return metrics


def test_decisions_are_counted_by_outcome_and_by_the_domains_that_settings_name() -> None:
    samples = samples_from(three_published())
    assert samples['kp_scorer_decisions_total{domain="code",outcome="accepted"}'] == 1
    assert samples[f'kp_scorer_decisions_total{{domain="{UNNAMED_DOMAIN}",outcome="rejected"}}'] == 2
    assert samples['kp_scorer_decisions_total{domain="code",outcome="review"}'] == 0
    assert not any("kp:trace" in name for name in samples)
    assert (samples["kp_scorer_score_count"], samples['kp_scorer_score_bucket{le="0.2"}']) == (3, 2)
    assert samples["kp_scorer_novelty_count"] == 1, "two had no embedder"
    waited = [samples[f'kp_scorer_queue_wait_seconds_{of}{{queue="traces"}}'] for of in ("count", "sum")]
    assert waited == [2, 2.0]
    assert samples["kp_scorer_processing_seconds_sum"] == pytest.approx(0.4)


def test_decisions_that_are_made_are_counted_by_the_bins_of_their_values() -> None:
    metrics = Metrics({"code"})
    for domain in ("code", "kp:trace:x\n", "law"):
        metrics.count_decided(decided(domain, outcome="rejected", score=0.29))
    samples = samples_from(metrics)
    counted = {name: value for name, value in samples.items() if name.startswith("kp_scorer_values_total") and value}
    assert len(counted) == 2 * 6
    assert counted['kp_scorer_values_total{bin="0.2",dimension="score",domain="code"}'] == 1
    assert counted[f'kp_scorer_values_total{{bin="rejected",dimension="outcome",domain="{UNNAMED_DOMAIN}"}}'] == 2
    assert samples['kp_scorer_values_total{bin="0.9",dimension="novelty",domain="code"}'] == 0, "from the start on"


def test_counters_begin_at_0_and_have_no_series_of_their_creation() -> None:
    metrics = Metrics(())
    metrics.count_dropped("conflict", 1)
    samples = samples_from(metrics)
    dropped = {reason: samples[f'kp_scorer_dead_letters_dropped_total{{reason="{reason}"}}'] for reason in REASONS}
    assert dropped == {reason: float(reason == "conflict") for reason in REASONS}
    assert [name for name in samples if "_created" in name] == []


def test_the_backlog_is_shown_as_it_was_last_read() -> None:
    metrics = Metrics(())
    metrics.set_backlog(BACKLOG)
    metrics.set_info("digest", embedder="words", engine="python", space="words-1")
    samples = samples_from(metrics)
    assert (samples["kp_scorer_pending"], samples["kp_scorer_oldest_pending_seconds"]) == (2, 7.5)
    assert samples['kp_scorer_queue_messages{kind="decisions",queue="decisions.rejected"}'] == 5
    assert samples['kp_scorer_submissions_used_ratio{queue="traces.search"}'] == 0.9
    assert 'kp_scorer_submissions_used_ratio{queue="traces"}' not in samples, "it has no limit"
    evictions = [samples[f'kp_scorer_redis_{name}{{server="redis"}}'] for name in ("evicts", "evicted_keys")]
    assert evictions == [0, 3]
    full = {name: samples[f'kp_scorer_results_full{{queue="{name}"}}'] for name in COUNTS}
    assert full == {"decisions.accepted": 0, "decisions.rejected": 1}
    assert not any(name.startswith("kp_scorer_decisions_dropped_total{") for name in samples)
    metrics.set_backlog(BACKLOG._replace(unread=UNREAD._replace(rings=("decisions.rejected",))))
    # The counter begins at 0, because a rate would miss the first increase of a series that begins with 1.
    assert samples_from(metrics)['kp_scorer_decisions_dropped_total{queue="decisions.rejected"}'] == 0
    of_bytes = {"decisions.accepted": 90, "decisions.rejected": 40}
    metrics.set_backlog(BACKLOG._replace(unread=UNREAD._replace(limit=10, bytes=of_bytes, most_bytes=100)))
    samples = samples_from(metrics)
    used = {name: samples[f'kp_scorer_results_used_ratio{{queue="{name}"}}'] for name in COUNTS}
    assert used == {"decisions.accepted": 0.9, "decisions.rejected": 0.5}
    (info,) = (name for name in samples if name.startswith("kp_scorer_info{"))
    assert 'engine="python"' in info


def test_a_backlog_that_was_not_read_yet_is_not_shown_as_0() -> None:
    metrics = Metrics(())
    unread = ("kp_scorer_pending", "kp_scorer_oldest_pending_seconds")
    assert all(math.isnan(samples_from(metrics)[name]) for name in unread)
    assert not any(name.startswith("kp_scorer_redis_memory_used_ratio{") for name in samples_from(metrics))
    metrics.set_backlog(BACKLOG._replace(servers={"redis": Condition(), "broker": Condition(0.85)}))
    samples = samples_from(metrics)
    assert math.isnan(samples['kp_scorer_redis_memory_used_ratio{server="redis"}']), "Redis does not report it"
    assert samples['kp_scorer_redis_memory_used_ratio{server="broker"}'] == 0.85
    assert samples["kp_scorer_pending"] == 2


@pytest.mark.parametrize(
    ("sent_ms", "queued"),
    [(98_500, 1_500), (101_000, 0), (None, None), ("98500", None), (-1, None), (2**70, None), (98.5, None), ([], None)],
)
def test_queue_wait_is_computed_from_the_sending_time_if_that_is_valid(sent_ms: Any, queued: int | None) -> None:
    assert queued_ms(SimpleNamespace(headers={} if sent_ms is None else {SENT_MS: sent_ms}), 100.0) == queued
