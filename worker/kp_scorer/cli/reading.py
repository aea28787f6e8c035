"""An input that is read ahead, so that what is there can be taken at once, and what is not there yet keeps nothing back."""

import os
import stat
import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import IO, Final

from kp_scorer.cli.input import Line, open_input, read_traces
from kp_scorer.decoding import Limits

_AHEAD_BYTES: Final = 4_194_304
"""Traces of a few kilobytes are there by the batch; of large ones few are held."""


class Reading:
    """Reads and decodes an input in a thread of its own, a batch ahead and no further."""

    def __init__(self, name: str, limits: Limits, most: int) -> None:
        """Begin to read the file, or standard input for ``-``; ``most`` lines go together at most."""
        self._most = most
        self._changed = threading.Condition()
        self._lines: deque[Line] = deque()
        self._size_bytes = 0
        self._wanted = 1
        self._read = 0
        self._total: int | None = None
        self._is_estimate = True
        self._is_ended = self._is_closed = False
        self._error: BaseException | None = None
        # A daemon, as nothing can be done about one that waits for input.
        threading.Thread(target=self._run, args=[name, limits], name="kp-scorer-reader", daemon=True).start()

    def batches(self) -> Generator[list[Line], None, None]:
        """Give what is there, a batch at most, and wait only while there is nothing; of a file always whole batches.

        Raises:
            BadParameter: the input cannot be opened or read, or is in another format; after the lines before.
        """
        try:
            while batch := self._take():
                yield batch
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def total(self) -> tuple[int | None, bool]:
        """How many lines there will be, None while nothing can be said; and whether that is an estimate."""
        with self._changed:
            return self._total, self._is_estimate

    def _take(self) -> list[Line]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or self._is_full() or len(self._lines) >= self._wanted)
            batch = [self._lines.popleft() for _ in range(min(self._most, len(self._lines)))]
            self._size_bytes -= sum(line.size_bytes for line in batch)
            self._changed.notify_all()
            if not batch and self._error:
                raise self._error
            return batch

    def _is_full(self) -> bool:
        return len(self._lines) >= self._most or self._size_bytes >= _AHEAD_BYTES

    def _run(self, name: str, limits: Limits) -> None:
        try:
            with open_input(name) as stream:
                self._put_all(read_traces(stream, limits), stream)
        except BaseException as error:
            self._error = error
        with self._changed:
            self._is_ended = True
            self._total, self._is_estimate = self._read, False
            self._changed.notify_all()

    def _put_all(self, lines: Iterator[Line], stream: IO[bytes]) -> None:
        size_bytes = _file_bytes(stream)
        # A file keeps nobody waiting. In whole batches it is scored faster, and the same each time.
        self._wanted = self._most if size_bytes else 1
        for line in lines:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or not self._is_full())
                if self._is_closed:
                    return
                self._lines.append(line)
                self._size_bytes += line.size_bytes
                self._read += 1
                self._total, self._is_estimate = line.of, False
                if line.of is None and size_bytes:
                    self._total, self._is_estimate = max(self._read, self._read * size_bytes // stream.tell()), True
                self._changed.notify_all()


def _file_bytes(stream: IO[bytes]) -> int:
    """The size of the file that a stream reads; 0 if it is none."""
    try:
        found = os.fstat(stream.fileno())
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
