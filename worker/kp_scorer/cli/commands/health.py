"""``kp-scorer health``: ask the workers on this machine whether they are live or ready.

It imports little, because a supervisor runs it every few seconds, beside a worker that needs the cores.
"""

import http.client
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import click

from kp_scorer.cli.output import print_note, print_row
from kp_scorer.files import read_toml
from kp_scorer.local.embedded_redis import running

_DEFAULTS: Final = {"host": "127.0.0.1", "port": "9464"}
_LOOPBACK_OF: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # a worker that listens on all addresses is asked on loopback
_TIMEOUT_S: Final = 5.0
_MOST_BYTES: Final = 65_536


@click.command(epilog="Example: kp-scorer health --ready")
@click.option(
    "--ready", "asks_ready", is_flag=True, help="Ask whether a worker can take work, not only whether it makes progress."
)
@click.option("--port", type=click.IntRange(1, 65_535), help="Port of the worker; by default metrics.port.")
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file with settings; by default the one that KP_CONFIG names.",
)
def health(asks_ready: bool, port: int | None, config: Path | None) -> bool:
    """Ask whether the worker on this machine, or each one that `up` runs for this user, makes progress; exit with 0 or 1.

    A worker that waits for Redis or the broker counts as making progress, because a restart would not help. It is ready if its
    model is loaded, Redis and the broker answer, it has read the window of the novelty log, and it is not stopping. Prints a
    line with the reasons for each worker. Probes that speak HTTP can ask /livez and /readyz on metrics.port themselves.

    It asks the workers of `up` if `up` runs and neither an option, a variable nor a file of settings names a host or a port.
    """
    asked, path = ("ready", "/readyz") if asks_ready else ("live", "/livez")
    settings = _metrics_settings(config)
    embedded = None if port or settings else running()
    if embedded:
        host = str(embedded.settings.get("metrics", {}).get("host", _DEFAULTS["host"]))
        answers = [_ask(host, _port(str(each)), path, embedded.pid) for each in embedded.ports]
    else:
        settings = _DEFAULTS | settings
        answers = [_ask(settings["host"], port or _port(settings["port"]), path)]
    for pid, reasons in answers:
        print_row({asked: not reasons, "pid": pid, "reasons": reasons}, f"worker {pid}: {asked}" if not reasons else "")
        for reason in reasons:
            print_note(f"not {asked}: {reason}")
    return any(reasons for _, reasons in answers)


def _metrics_settings(config: Path | None) -> dict[str, str]:
    """Read port and host from the environment and a TOML file; ``load_settings`` would take half a second of a core."""
    variables = {name.upper(): value for name, value in os.environ.items()}
    section: dict[str, Any] = {}
    if path := config or variables.get("KP_CONFIG"):
        try:
            section = read_toml(path).get("metrics", {})
        except OSError as error:
            raise click.BadParameter(f"{path}: {error.strerror}", param_hint="--config") from None
        if not isinstance(section, dict):
            raise click.BadParameter(f"{path}: metrics: expected a section", param_hint="--config")
    values = {name: variables.get(f"KP_METRICS_{name.upper()}", section.get(name)) for name in _DEFAULTS}
    return {name: str(value) for name, value in values.items() if value is not None}


def _port(value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < 65_536:
        raise click.BadParameter("expected a port from 1 on: a worker without one answers no probe", param_hint="metrics.port")
    return int(value)


def _ask(host: str, port: int, path: str, parent: int = 0) -> tuple[int | None, list[str]]:
    """Ask the worker on a port, which must be a child of ``parent`` if that is not 0; return its process id and its reasons."""
    # Unlike urllib, http.client obeys no variable that names a proxy.
    connection = http.client.HTTPConnection(_LOOPBACK_OF.get(host, host), port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        answer = json.loads(response.read(_MOST_BYTES))
        pid, reasons = int(answer["pid"]), [str(reason) for reason in answer["reasons"]]
        if parent and not _is_child(pid, parent):
            return None, [f"the worker on port {port} is not one of this `up`"]
        return pid, reasons
    except OSError as error:
        return None, [f"no worker answers on port {port}: {error.strerror or 'it takes too long'}"]
    except (http.client.HTTPException, ValueError, LookupError, TypeError):
        return None, [f"the program on port {port} is not a worker"]
    finally:
        connection.close()


def _is_child(pid: int, parent: int) -> bool:
    """Return whether a process is a child of another one; always True on systems other than Linux."""
    try:
        return f"\nPPid:\t{parent}\n" in Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except OSError:
        return sys.platform != "linux"
