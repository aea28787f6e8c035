"""Reads an input in a thread of its own, so that what it is read for need not wait."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kp_scorer.cli.converting import Conversion, Line
from kp_scorer.cli.input import read_files
from kp_scorer.decoding import Limits

_AHEAD_BYTES: Final = 4_194_304  # The most bytes to read ahead: a batch of traces of a few kilobytes, or a few large ones.


class ReadAhead:
    """Reads an input in a thread of its own, one batch ahead; lines are available as soon as they have arrived."""

    def __init__(self, names: Sequence[str], limits: Limits, most: int, conversion: Conversion | None = None) -> None:
        """Begin to read files, folders, or standard input for ``-``, in batches of ``most`` lines at most."""
        self._most = most
        self._changed = threading.Condition()
        self._lines: list[Line] = []
        self._wanted = 1  # The number of lines to wait for; 0 once there are no more.
        self._error: BaseException | None = None
        # A daemon thread, because nothing interrupts a thread that waits for input.
        threading.Thread(target=self._run, args=[names, limits, conversion], name="kp-scorer-reader", daemon=True).start()

    def batches(self) -> Iterator[list[Line]]:
        """Yield the lines that have arrived, a batch at most; wait only if there are none, and for full batches of files.

        Raises:
            BadParameter: as by :func:`read_traces`, or the input cannot be opened; after the lines before.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_full() or len(self._lines) >= self._wanted)
                batch, self._lines = self._lines, []
                self._changed.notify_all()
            if not batch:
                break
            yield batch
        if self._error:
            raise self._error

    def _is_full(self) -> bool:
        return len(self._lines) >= self._most or sum(line.size_bytes for line in self._lines) >= _AHEAD_BYTES

    def _run(self, names: Sequence[str], limits: Limits, conversion: Conversion | None) -> None:
        try:
            if all(name != "-" and (Path(name).is_file() or Path(name).is_dir()) for name in names):
                # A file never blocks. Full batches are scored faster, and every time alike.
                self._wanted = self._most
            for line in read_files(names, limits, conversion):
                with self._changed:
                    self._changed.wait_for(lambda: not self._is_full())
                    self._lines.append(line)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._wanted = 0
            self._changed.notify_all()
