"""One thread that does all computing, in turns.

A network uses every core by itself, so two requests at once would only get in each other's way. Jobs are generators:
each `yield` ends a turn, and the next turn belongs to the next job. So a request for one photo waits for one photo of
every other request, not for the whole of the longest.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vat.service.limits import Closing, Limits, OutOfTime, QueueFull

Result = TypeVar("Result")
Turns = Generator[None, None, Result]
"""The work of a job: yields after each part, returns its result."""

GOODBYE = "The service is shutting down; send the request again later."
SMOOTHING = 0.1  # weight of the latest turn in the mean that guesses how long the queue takes


@dataclass
class _Job:
    turns: Turns[Any]
    deadline: float
    done: Future[Any] = field(default_factory=Future)


class Worker:
    """Runs jobs until it is closed, and then those that were begun."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._slots = 0
        self._refusing = self._closing = False
        self._mean_turn = 0.1
        self._thread = threading.Thread(target=self._work, name="vat-worker", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> int:
        """Requests under way."""
        return self._slots

    @contextmanager
    def slot(self) -> Iterator[None]:
        """A place among the requests under way, or `QueueFull`. Taken before an upload is read into memory."""
        with self._changed:
            if self._refusing:
                raise Closing(GOODBYE)
            if self._slots >= self.limits.queue:
                raise QueueFull(max(1, math.ceil(self._mean_turn * self._slots)))
            self._slots += 1
        try:
            yield
        finally:
            with self._changed:
                self._slots -= 1

    def submit(self, turns: Turns[Result]) -> Future[Result]:
        """Let the job take turns. A future that is cancelled gives up its turns."""
        job = _Job(turns, time.monotonic() + self.limits.seconds)
        with self._changed:
            if self._closing:
                raise Closing(GOODBYE)
            self._jobs.append(job)
            self._changed.notify()
        return job.done

    def refuse(self) -> None:
        """Give no more slots; those who have one may go on."""
        self._refusing = True

    def close(self) -> None:
        """Finish what was begun, then stop. May be called again."""
        with self._changed:
            self._refusing = self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            started = time.monotonic()
            if self._turn(job):
                with self._changed:
                    self._jobs.append(job)
            self._mean_turn += SMOOTHING * (time.monotonic() - started - self._mean_turn)

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            return self._jobs.popleft() if self._jobs else None

    def _turn(self, job: _Job) -> bool:
        """One turn; whether there are more to come. Whatever goes wrong belongs to the job, not to the worker."""
        with suppress(InvalidStateError):  # cancelled meanwhile: nobody waits for the outcome
            if job.done.cancelled():
                job.turns.close()
                return False
            if time.monotonic() > job.deadline:
                job.turns.close()
                job.done.set_exception(OutOfTime(f"The request took longer than {self.limits.seconds:g} seconds."))
                return False
            try:
                next(job.turns)
                return True
            except StopIteration as end:
                job.done.set_result(end.value)
            except BaseException as error:
                job.done.set_exception(error)
        return False
