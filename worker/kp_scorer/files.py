"""Opens the regular files that users name, reads them up to a limit, and never writes through a link.

It also determines the folders for a user's state and cache. It imports only the standard library, as `health` must not depend
on anything else.
"""

import errno
import grp
import os
import pwd
import stat
import tomllib
from pathlib import Path
from typing import IO, Any, Final

_MOST_TOML_BYTES: Final = 2**20


def open_regular(path: Path | str, mode: str = "rb", *, follow: bool = True, **options: Any) -> IO[Any]:
    """Open a regular file; without ``follow``, no symbolic link. Raise OSError for a FIFO, a device or a directory."""

    def opener(name: str, flags: int) -> int:
        # With O_NONBLOCK, opening a FIFO does not wait for its other end.
        return os.open(name, flags | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), 0o666)

    try:
        file: IO[Any] = open(path, mode, opener=opener, **options)  # noqa: SIM115 - returned open
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "expected a file, not a symbolic link") from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "expected a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "expected a regular file")
    return file


def read_text(path: Path | str, most_bytes: int) -> str:
    """Read a regular file of at most ``most_bytes`` of UTF-8; raise OSError, which quotes nothing of the content."""
    with open_regular(path) as file:
        content: bytes = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "expected UTF-8") from None


def read_toml(path: Path | str) -> dict[str, Any]:
    """Read a TOML file of at most a mebibyte; raise OSError as ``read_text`` does, or with the mistake in the TOML."""
    try:
        return tomllib.loads(read_text(path, _MOST_TOML_BYTES))
    except tomllib.TOMLDecodeError as error:
        raise OSError(errno.EINVAL, str(error)) from None
    except RecursionError:
        raise OSError(errno.EINVAL, "expected less nesting") from None
    except ValueError:
        raise OSError(errno.EINVAL, "expected numbers of fewer digits") from None


def make_only_ours(path: Path) -> bool:
    """Forbid others to write to a file or directory; return False if it belongs to another user."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return False
    path.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    return True


def is_only_ours(status: os.stat_result) -> bool:
    """Return whether only this user and root can change a file or directory with this status."""
    return status.st_uid in (0, os.geteuid()) and not _is_writable_by_others(status)


def check_writer(path: Path | str) -> None:
    """Raise OSError, as ``read_text`` does, if anybody but its owner and root can change a file."""
    if _is_writable_by_others(Path(path).stat()):
        raise OSError(errno.EPERM, "others can write to it: chmod go-w")


def _is_writable_by_others(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid, status.st_uid)


def _is_private_group(group_id: int, user_id: int) -> bool:
    """Return whether a group is the private one of a user: it has the same name, and no other member."""
    # Debian and others make such a group for each user, with a umask of 002, so that every file is writable by its group.
    try:
        user, group = pwd.getpwuid(user_id), grp.getgrgid(group_id)
    except KeyError:
        return False
    members = {*group.gr_mem, *(each.pw_name for each in pwd.getpwall() if each.pw_gid == group_id)}
    return group.gr_name == user.pw_name and members == {user.pw_name}


def state_dir() -> Path:
    """Return the folder of the note on the running instance and, by default, of its data; raise OSError without a home."""
    return Path(os.environ.get("XDG_STATE_HOME") or _home() / ".local" / "state") / "kp-scorer"


def cache_dir() -> Path:
    """Return the folder that keeps compiled rules for the next start; raise OSError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "kp-scorer"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home: set HOME") from None
