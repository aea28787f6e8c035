"""Manages the folder of ``kp-scorer keep --into``, in which each run of the command writes a file of kept traces."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from kp_scorer.characters import escaped

_NAME: Final = re.compile(r"kept-([0-9]{1,18})\.jsonl(?:\.gz|\.zst)?")


class KeptFolder:
    """A folder with a file of traces for each run of the command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def earlier(self) -> list[Path]:
        """Return the files of earlier runs of the command, in order; they may have been compressed since."""
        return sorted(filter(_number_in, self.path.glob("kept-*.jsonl*")), key=_number_in)

    def next_file(self) -> str:
        """Return the name of the file to write next."""
        last = max(map(_number_in, self.earlier()), default=0)
        return str(self.path / f"kept-{last + 1:04}.jsonl")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder if it is missing, and let no other command add to it; raise BadParameter if one does already."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = "another command adds to it" if isinstance(error, BlockingIOError) else error.strerror
            raise click.BadParameter(escaped(f"{self.path}: {problem}"), param_hint="--into") from None
        try:
            yield
        finally:
            os.close(descriptor)


def _number_in(file: Path) -> int:
    """Return the number in the name of a file, from 1; 0 if the command has not given that name."""
    match = _NAME.fullmatch(file.name)
    return int(match[1]) if match else 0
