"""What a service allows. Each limit is an option of `vat serve` and answers with a sentence, never with a crash."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vat.errors import VatError

MIB = 1 << 20
DROP = 16
"""What is dropped on the page at once may be so many times as large as a request, and take so many times as long: it is
a pile of photos, which go to disk one by one."""
RETRY_SECONDS = "5"
"""When to come back after a 503."""


@dataclass(frozen=True)
class Limits:
    """Defaults suit a laptop and photos from a phone."""

    upload_mib: float = 64
    """Of one request, all its files together. Of one photo on the page: see `DROP`."""
    json_mib: float = 1
    """Of a body, or a mask, that is text: nothing of that kind needs to be long."""
    megapixels: float = 50
    """Of one photo or mask."""
    supports: int = 32
    """Examples in one request."""
    queries: int = 64
    """Photos in one request."""
    points: int = 4096
    """Points to match in one request."""
    queue: int = 64
    """Requests under way, whether they upload, wait or compute; the next one is answered with 429."""
    seconds: float = 120
    """From the end of the upload to the answer."""
    upload_seconds: float = 30
    """For the upload alone."""
    stored_examples: int = 256
    """Encoded examples kept in memory; the sets that were not used for longest make room."""
    stored_seconds: float = 3600
    """A set of examples that was not used for so long is forgotten."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise VatError(f"The limit {field.name} is {getattr(self, field.name)}; it must be more than 0.")

    @property
    def pixels(self) -> int:
        return int(self.megapixels * 1e6)

    @property
    def upload_bytes(self) -> int:
        return int(self.upload_mib * MIB)

    @property
    def json_bytes(self) -> int:
        return int(self.json_mib * MIB)


class QueueFull(VatError):  # noqa: N818  it reads as what happened
    """There is no room for another request; `seconds` is a guess of when there will be."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"The service is busy; try again in {seconds} second{'' if seconds == 1 else 's'}.")
        self.seconds = seconds


class OutOfTime(VatError):  # noqa: N818
    """A request that took longer than it may."""


class Closing(VatError):  # noqa: N818
    """The service shuts down and takes nothing new."""


class UnknownSet(VatError):  # noqa: N818
    """No set of examples is stored under an id."""
