"""Several workers on the same settings. A supervised fleet replaces each worker that ends, as in production."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from kp_scorer.settings import Settings

from tests.support.processes import PATIENCE_S, Worker, launch_worker, wait_until

Variables = Callable[[int, int], Mapping[str, str]]
"""Returns the variables of a worker beside its settings, from its place and from the number of its predecessors there."""


class Fleet:
    """A group of workers. A supervised fleet replaces each worker that ends, until the fleet is stopped."""

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        count: int,
        command: Sequence[str],
        variables: Variables = lambda place, life: {},
        *,
        supervised: bool = False,
    ) -> None:
        """Prepare the workers. They start when the context is entered, and each logs to a file in ``directory``."""
        self.settings = settings
        self._directory = directory
        self._command = command
        self._variables = variables
        self._lives = [0] * count
        self._workers: list[Worker] = []
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._replace_the_dead, daemon=True) if supervised else None
        self.ends: list[int] = []
        """The exit codes of the workers that were replaced; -9 stands for SIGKILL."""

    def __getitem__(self, place: int) -> Worker:
        return self._workers[place]

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers))

    def kill(self, place: int) -> None:
        self._workers[place].process.kill()

    def wait_until_ready(self) -> None:
        """Wait until every place has a worker that is ready; without a supervisor, fail if one has ended."""
        for place in range(len(self._workers)):
            if self._supervisor:
                wait_until(lambda place=place: self._workers[place].events("worker_ready"))  # type: ignore[misc]
            else:
                self._workers[place].wait_until_ready()

    def logged(self, event: str) -> int:
        """Count the log lines of an event by all workers, dead ones included."""
        return sum(path.read_text("utf-8").count(f'"event": "{event}"') for path in self._directory.glob("worker-*.log"))

    def stop(self) -> list[int]:
        """Stop all workers gracefully, except for those that have ended already; return the exit codes."""
        self._stopping.set()
        if self._supervisor:
            self._supervisor.join()
        for worker in self._workers:
            worker.process.terminate()
        try:
            # Send the signal only once, because a second one would kill a process in its last steps.
            return [worker.process.wait(PATIENCE_S) for worker in self._workers]
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.wait()

    def __enter__(self) -> Self:
        self._directory.mkdir(exist_ok=True)
        self._workers = [self._launch(place) for place in range(len(self._lives))]
        if self._supervisor:
            self._supervisor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _replace_the_dead(self) -> None:
        while not self._stopping.wait(0.05):
            for place, worker in enumerate(self._workers):
                if worker.process.poll() is not None:
                    self.ends.append(worker.process.returncode)
                    self._workers[place] = self._launch(place)

    def _launch(self, place: int) -> Worker:
        life = self._lives[place]
        self._lives[place] += 1
        log = self._directory / f"worker-{place}-{life:03}.log"
        return launch_worker(self.settings, log, self._command, self._variables(place, life))


@contextmanager
def start_fleet(settings: Settings, directory: Path, count: int, command: Sequence[str]) -> Iterator[Fleet]:
    """Run several workers without a supervisor, and wait until all are ready."""
    with Fleet(settings, directory, count, command) as fleet:
        fleet.wait_until_ready()
        yield fleet
