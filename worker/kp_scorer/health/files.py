"""The files in which workers note how they are: one for each process, in a directory of their user's."""

import errno
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kp_scorer.errors import SettingsError
from kp_scorer.health.state import State

_PREFIX: Final = "worker-"
_MOST_BYTES: Final = 65_536
_PRIVATE: Final = 0o700
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def directory_of(setting: str) -> Path:
    """Where workers have their files, by what ``health.directory`` is set to.

    By default not in the user's home, which a container may have read-only, nor in ``$XDG_RUNTIME_DIR``, which a worker and who
    looks at it may not share.
    """
    # Python's own search for a temporary directory fails where none can be written to, and a worker does without.
    return Path(setting or f"{os.environ.get('TMPDIR') or '/tmp'}/kp-scorer-{os.geteuid()}")  # noqa: S108


def chosen_directory(config: Path | None) -> Path:
    """Where workers have their files, by the environment and a TOML file alone.

    The settings say the same, and take half a second of a core to load: too much for what is asked every few seconds.

    Raises:
        SettingsError: the TOML file cannot be read.
    """
    for name, value in os.environ.items():
        if name.upper() == "KP_HEALTH_DIRECTORY":
            return directory_of(value)
    path = config or os.environ.get("KP_CONFIG")
    if not path:
        return directory_of("")
    try:
        section: Any = tomllib.loads(Path(path).read_text("utf-8")).get("health", {})
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}") from None
    return directory_of(str(section.get("directory", "")) if isinstance(section, dict) else "")


def make_private(directory: Path) -> None:
    """Make a directory for this user alone, if there is none.

    Raises:
        OSError: it cannot be made, is another user's, or others may write to it.
    """
    directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    _check_private(directory)


def _check_private(directory: Path) -> None:
    found = directory.lstat()
    # Where everybody may make directories, somebody else may have made this one.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EACCES, "it is not this user's alone")


def write(directory: Path, state: State) -> None:
    """Put a state in place of the process's last one, in one step.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(directory, state.pid)
    beside = path.with_suffix(".new")
    beside.write_text(state.as_json(), "utf-8")
    beside.replace(path)


def remove(directory: Path, pid: int) -> None:
    """Remove the file of a process, if it is there."""
    path = _path(directory, pid)
    for each in (path, path.with_suffix(".new")):
        with suppress(OSError):
            each.unlink()


def read(path: Path) -> State | None:
    """Read a file; None if there is none, or it is none of ours."""
    try:
        # What is no file, or is endless, holds nobody up.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return State.parse(file.read(_MOST_BYTES).decode())
    except (OSError, ValueError):
        return None


def find(directory: Path, pid: int | None = None) -> list[State]:
    """The states of the processes that run; of one alone, running or not, if its id is given.

    Where none runs, the one that was written last, so that it can be said what became of it.

    Raises:
        OSError: the directory is not this user's alone, so that anybody may have written what is in it.
    """
    if not directory.exists():
        return []
    _check_private(directory)
    if pid is not None:
        return list(filter(None, [read(_path(directory, pid))]))
    states = list(_all(directory))
    running = [state for state in states if state.is_running]
    return running or sorted(states, key=lambda state: state.written_s)[-1:]


def sweep(directory: Path) -> None:
    """Remove the files of processes that have ended without doing so themselves."""
    for state in list(_all(directory)):
        if not state.is_running:
            remove(directory, state.pid)


def _all(directory: Path) -> Iterator[State]:
    yield from filter(None, map(read, directory.glob(f"{_PREFIX}*.json")))


def _path(directory: Path, pid: int) -> Path:
    return directory / f"{_PREFIX}{pid}.json"
