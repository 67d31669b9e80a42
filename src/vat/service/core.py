"""The models of a service behind one queue: what the HTTP endpoints and the page both talk to."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from vat.errors import VatError
from vat.images import ImageLike
from vat.matcher import Matcher
from vat.network import PairNetwork
from vat.predict.results import Match, Segmentation
from vat.segmenter import Options, Segmenter
from vat.service.limits import Limits
from vat.service.metrics import Metrics
from vat.service.store import Examples, Store, SupportSet, digest
from vat.service.uploads import about
from vat.service.worker import Turns, Worker

ModelLike = str | os.PathLike[str] | PairNetwork
Supports = str | Examples
"""The id of a stored set, or the examples themselves."""

Finished = TypeVar("Finished")


class Service:
    """Segmentation and matching for many callers at once, over HTTP or not.

    Every method may be called from any thread. Calls wait for their turn in one worker thread and raise `VatError`:
    `QueueFull` at once where too many wait, `OutOfTime` where one took too long, `UnknownSet` for a wrong id.

    Args:
        model: for segmentation; `matcher`: for correspondence, or None to do without.
        device: "auto" takes CUDA, else MPS, else the CPU.
        image_size: side of the square that photos are resized to; by default the one each model was trained at.
    """

    def __init__(
        self,
        model: ModelLike = "vat-mini",
        device: str | torch.device = "auto",
        limits: Limits | None = None,
        *,
        matcher: ModelLike | None = None,
        image_size: int | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.names = {"segmentation": model_name(model)}
        self.segmenter = Segmenter(model, device, image_size=image_size)
        self.matcher = None if matcher is None else Matcher(matcher, device, image_size=image_size)
        if matcher is not None:
            self.names["correspondence"] = model_name(matcher)
        self.stored = Store(self.limits)
        self._recent = Store(self.limits)
        self.worker = Worker(self.limits)
        self.metrics = Metrics(lambda: self.worker.busy, lambda: len(self.stored))

    # -- calls that wait -----------------------------------------------------------------------------------------

    def segment(
        self, supports: Supports, images: Sequence[ImageLike], options: Options | None = None
    ) -> list[Segmentation]:
        """The masks of photos, in their order. For progress, ask for them one by one: equal examples are encoded
        once, however often they are sent."""
        with self.worker.slot():
            return self.worker.submit(self.segmenting(supports, images, options, lambda _, result: result)).result()

    def match(self, source: ImageLike, target: ImageLike, points: Any = None) -> Match:
        """As `vat.Matcher.match`."""
        with self.worker.slot():
            return self.worker.submit(self.matching(source, target, points, lambda match: match)).result()

    def store(self, examples: Examples) -> SupportSet:
        """Encode examples and keep them under a new id."""
        with self.worker.slot():
            return self.worker.submit(self.storing(examples)).result()

    def close(self) -> None:
        """Finish what was begun and take nothing new."""
        self.worker.close()

    # -- the same as jobs for `worker.submit`, for those who wait in another way -------------------------------------

    def segmenting(
        self,
        supports: Supports,
        images: Sequence[ImageLike],
        options: Options | None,
        finish: Callable[[int, Segmentation], Finished],
    ) -> Turns[list[Finished]]:
        """One turn for the examples, one for each photo. `finish` turns the result of the i-th photo into what is
        kept of it: probabilities of many large photos would fill the memory."""
        chosen = options or Options()
        if isinstance(supports, str):
            segmenter = self.stored.get(supports).segmenter
        else:
            segmenter = self._fit(supports)
            yield
        finished = []
        for i, image in enumerate(images):
            if i:
                yield
            with self.metrics.turns.labels("segment").time(), about(image):
                finished.append(finish(i, segmenter.predict(image, **vars(chosen))))
            self.metrics.photos.labels("segment").inc()
        return finished

    def matching(
        self, source: ImageLike, target: ImageLike, points: Any, finish: Callable[[Match], Finished]
    ) -> Turns[Finished]:
        yield from ()  # one turn does it
        if self.matcher is None:
            raise VatError("This service has no model for correspondence.")
        with self.metrics.turns.labels("match").time():
            finished = finish(self.matcher.match(source, target, points))
        self.metrics.photos.labels("match").inc()
        return finished

    def storing(self, examples: Examples) -> Turns[SupportSet]:
        yield from ()
        return self.stored.keep(self._fit(examples))

    def _fit(self, examples: Examples) -> Segmenter:
        """A segmenter that knows these examples. Copies share the network, and learn each for itself."""
        if not any(examples.values()):
            raise VatError("There is no example to learn from; give at least one photo with its mask.")
        key = digest(examples)
        known = self._recent.find(key)
        if known is not None:
            self.metrics.reused.inc()
            return known.segmenter
        with self.metrics.turns.labels("fit").time():
            segmenter = copy.copy(self.segmenter)
            for name, pairs in examples.items():
                for image, mask in pairs:
                    with about(image):
                        segmenter.add(name, image, mask)
        self._recent.keep(segmenter, key)
        return segmenter


def model_name(model: ModelLike) -> str:
    """A built-in name as it is, a file without its folder (which is nobody's business), a network by its family."""
    return type(model).__name__ if isinstance(model, PairNetwork) else os.path.basename(os.fspath(model))
