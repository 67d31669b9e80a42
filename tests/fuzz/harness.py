"""Runs cases: a mutated file, a reader, a time limit, and what may come out of it."""

import resource
import signal
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fuzz.mutations import mutate
from fuzz.readers import Reader
from vat.errors import VatError

SECONDS = 10
MOST_GROWTH = 1 << 30
"""Bytes that the process may grow by over a whole run."""


@dataclass(frozen=True)
class Failure:
    """A case that ended otherwise than with a result or one sentence; `file` reproduces it."""

    reader: str
    seed: int
    file: Path
    what: str


class TooSlow(BaseException):
    """No reader may catch it."""


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def expire(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(reader: Reader, seed: int, folder: Path) -> Failure | None:
    """One mutated file through one reader."""
    rng = np.random.default_rng([seed, sum(reader.name.encode())])
    data = mutate(reader.seeds[int(rng.integers(len(reader.seeds)))], reader.seeds, rng)
    file = folder / f"case{reader.suffix}"
    file.write_bytes(data)
    try:
        with limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(file)
    except VatError as error:
        what = "" if is_one_sentence(str(error)) else f"not one sentence: {error!r}"
    except TooSlow:
        what = f"took longer than {SECONDS} s"
    except BaseException:
        what = traceback.format_exc()
    else:
        what = ""
    if not what:
        return None
    kept = folder / f"{reader.name.replace(' ', '_')}_{seed}{reader.suffix}"
    file.rename(kept)
    return Failure(reader.name, seed, kept, what)


def is_one_sentence(text: str) -> bool:
    """Something to read on one line, and no more than a screenful of it."""
    return 10 < len(text) < 1000 and "Traceback" not in text and text.strip().count("\n") == 0


def run(readers: list[Reader], cases: int, folder: Path, first: int = 0) -> list[Failure]:
    """`cases` mutated files for every reader; growth of the process beyond its limit is a failure, too."""
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failures = []
    for reader in readers:
        for seed in range(first, first + cases):
            failure = run_case(reader, seed, folder)
            if failure:
                failures.append(failure)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
        if grown > MOST_GROWTH:
            failures.append(Failure(reader.name, -1, folder, f"the process grew by {grown / 2**20:.0f} MiB"))
            start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return failures
