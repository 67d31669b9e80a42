"""`Segmenter`: from a few labelled photos to the masks of any others.

seg = vat.Segmenter()
seg.fit(["a.jpg", "b.jpg"], ["a.png", "b.png"])
seg.predict("photo.jpg").save("masks")
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from vat.errors import VatError
from vat.images import IMAGE_SUFFIXES, ImageLike, image_size
from vat.network import PairNetwork
from vat.predict.encodings import Encoding
from vat.predict.engine import Engine, read_pixels
from vat.predict.fitted import Fitted, read_fitted, save_fitted
from vat.predict.masks import MaskLike, example_mask
from vat.predict.results import Segmentation
from vat.predict.supports import MAX_CLASSES, as_examples
from vat.predict.tiles import Tiles, Views, class_scores
from vat.self_support import SelfSupport

OnError = Literal["raise", "skip"] | Callable[[Path, VatError], None]

CHUNK_ON_GPU = 8  # examples that meet a photo at once; on a CPU one by one is as fast and takes the least memory
PIXELS_AT_ONCE = 1 << 18
READERS = 3  # threads that decode the photos to come

_Item = TypeVar("_Item")
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Options:
    """What `Segmenter.predict` takes beside the photo."""

    threshold: float = 0.5
    overlapping: bool = False
    tiles: Tiles = None
    scales: Sequence[float] = (1.0,)
    flip: bool = False
    self_support: bool = False
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        for name in ("threshold", "min_confidence"):
            if not 0 <= getattr(self, name) <= 1:
                raise VatError(f"{name} is {getattr(self, name)}; it is a probability, from 0 to 1.")
        self.views()  # refuses what cannot be, before anything is computed

    def views(self) -> Views:
        return Views(self.tiles, tuple(self.scales), self.flip, SelfSupport() if self.self_support else None)


@dataclass(frozen=True)
class _Photo:
    """A photo as read: `pixels` uint8 [3, h, w], perhaps smaller than its own `size` (height, width)."""

    pixels: Tensor
    size: tuple[int, int]
    source: ImageLike


class Segmenter:
    """Few-shot segmentation of photos.

    Args:
        model: the name of a built-in model, a checkpoint file, or a segmentation network of any family.
        device: "auto" takes CUDA, else MPS, else the CPU.
        precision: "auto" is bfloat16 on CUDA and float32 elsewhere.
        image_size: side of the square that photos are resized to; by default the one the model was trained at.
        batch_size: how many examples meet a photo at once. It changes speed and memory, and results by no more than
            rounding. Photos go through the network one by one, so that none depends on another.

    Predictions may be asked for from several threads; they take turns.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PairNetwork = "vat-mini",
        device: str | torch.device = "auto",
        *,
        precision: str = "auto",
        image_size: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.engine = Engine(model, "segmentation", device, precision, image_size)
        if batch_size is not None and batch_size < 1:
            raise VatError(f"batch_size is {batch_size}; it must be at least 1.")
        self.batch_size = batch_size or (CHUNK_ON_GPU if self.engine.device.type == "cuda" else 1)
        self._fitted = Fitted()
        self._fitting = threading.Lock()

    @property
    def classes(self) -> list[str]:
        """In the order of their numbers in label maps, which begin with 1."""
        return list(self._fitted.classes)

    @property
    def shots(self) -> dict[str, int]:
        """Class -> number of its examples."""
        return self._fitted.shots()

    # -- examples --------------------------------------------------------------------------------------------

    def fit(self, images: Any, masks: Any = None) -> Segmenter:
        """Learn from labelled photos, in place of all that was learnt before.

        `fit(images, masks)` with lists, or one of each, makes a class named "object";
        `fit({"cat": [(image, mask), ...], "dog": [...]})` several; `fit("examples/")` reads what
        `vat.predict.supports` describes. Each example is encoded once. If one is refused, nothing changes.
        """
        with self._fitting:
            fitted = Fitted()
            for name, pairs in as_examples(images, masks).items():
                for image, mask in pairs:
                    fitted = fitted.with_example(name, self._encode(name, image, mask), self.batch_size)
            self._replace(fitted)
        return self

    def add(self, name: str, image: ImageLike, mask: MaskLike) -> Segmenter:
        """One more example of a class, new or known; the others are kept as they are."""
        with self._fitting:
            if len({*self._fitted.classes, name}) > MAX_CLASSES:
                raise VatError(f"There are {MAX_CLASSES} classes already; no more can be told apart.")
            self._replace(self._fitted.with_example(name, self._encode(name, image, mask), self.batch_size))
        return self

    def _replace(self, fitted: Fitted) -> None:
        self._fitted = fitted
        self.engine.forget()

    def _encode(self, name: str, image: ImageLike, mask: MaskLike) -> Encoding:
        inside = example_mask(image, mask, name)
        return self.engine.encode_example(read_pixels(image, self.engine.image_size), inside)

    # -- predictions -----------------------------------------------------------------------------------------

    def predict(
        self,
        image: ImageLike,
        *,
        threshold: float = 0.5,
        overlapping: bool = False,
        tiles: Tiles = None,
        scales: Sequence[float] = (1.0,),
        flip: bool = False,
        self_support: bool = False,
        min_confidence: float = 0.0,
    ) -> Segmentation:
        """The masks of one photo, at its own size and orientation.

        Args:
            threshold: the least probability of foreground; higher gives smaller and surer masks.
            overlapping: let a pixel belong to several classes; by default they and the background compete for it.
            tiles: also look at overlapping tiles, this many along the longer side ("auto": as the photo's size
                suggests), for small and thin objects in large photos. Takes as many times longer as there are tiles.
            scales: sizes to look at the photo in, relative to the network's own; the mean is taken.
            flip: look at the mirrored photo too.
            self_support: look again, with what was surely found as one more example (`vat.self_support`); each tile
                and view by itself.
            min_confidence: classes of which the result's `confidence` is less than this are taken not to be in the
                photo, and get no mask.
        """
        options = Options(threshold, overlapping, tiles, scales, flip, self_support, min_confidence)
        return self._segment(self._read(image, options), options, self._learnt())

    def predict_batch(self, images: Iterable[ImageLike], **options: Any) -> list[Segmentation]:
        """`predict` for several photos, with its options; the next ones are read while one is worked on."""
        return [result for _, result in self._stream(images, "raise", Options(**options))]

    def predict_folder(
        self, folder: str | os.PathLike[str], recursive: bool = True, on_error: OnError = "raise", **options: Any
    ) -> Iterator[Segmentation]:
        """`predict` for all photos of a folder in the order of their names, one at a time as they are asked for.

        A photo that cannot be read raises `VatError`, is left out ("skip"), or is handed to `on_error(path, error)`.
        `name` of a result is the photo's path within the folder.
        """
        root = Path(folder)
        if not root.is_dir():
            raise VatError(f"There is no folder '{root}'.")
        found = sorted(root.rglob("*") if recursive else root.iterdir())
        photos = [path for path in found if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
        for path, result in self._stream(photos, on_error, Options(**options)):
            result.name = path.relative_to(root).as_posix()
            yield result

    def _stream(
        self, images: Iterable[_Item], on_error: OnError, options: Options
    ) -> Iterator[tuple[_Item, Segmentation]]:
        learnt = self._learnt()
        for image, reading in _ahead(lambda item: self._read(item, options), images):
            try:
                result = self._segment(reading.result(), options, learnt)
            except VatError as error:
                if on_error == "raise":
                    raise
                if callable(on_error):
                    on_error(image, error)  # type: ignore[arg-type]
                continue
            yield image, result

    def _learnt(self) -> Fitted:
        if not self._fitted.classes:
            raise VatError("Nothing was learnt yet: call fit with labelled examples first.")
        return self._fitted

    def _read(self, image: Any, options: Options) -> _Photo:
        size = image_size(image)
        pixels = read_pixels(image, options.views().needed_side(size, self.engine.image_size))
        return _Photo(pixels, size, image)

    def _segment(self, photo: _Photo, options: Options, learnt: Fitted) -> Segmentation:
        scores = class_scores(self.engine, learnt.chunks, learnt.owners, photo.pixels, photo.size, options.views())
        confidence = rule_out(scores, options.min_confidence)
        labels = decide(scores, options.threshold, options.overlapping)
        return Segmentation(
            classes=learnt.classes,
            label_map=labels.numpy(),
            probabilities=scores.numpy(),
            source=photo.source,
            name=Path(photo.source).name if isinstance(photo.source, str | os.PathLike) else None,
            threshold=options.threshold,
            overlapping=options.overlapping,
            confidence=dict(zip(learnt.classes, confidence.tolist(), strict=True)),
        )

    # -- files -----------------------------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        """Keep what was learnt in one .safetensors file: features of the examples, no photos.

        A model that is not built in goes into the file too, so that it needs nothing else. `dtype` stores features
        in another precision: float16 halves them.
        """
        save_fitted(self._learnt(), self.engine, Path(file), dtype)

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str],
        device: str | torch.device = "auto",
        *,
        precision: str = "auto",
        batch_size: int | None = None,
    ) -> Segmenter:
        """A segmenter as it was saved, on this device."""
        stored = read_fitted(Path(file))
        segmenter = cls(stored.model, device, precision=precision, image_size=stored.image_size, batch_size=batch_size)
        for name, encoding in stored.encodings(segmenter.engine):
            segmenter._fitted = segmenter._fitted.with_example(name, encoding, segmenter.batch_size)
        return segmenter


def rule_out(scores: Tensor, least: float) -> Tensor:
    """The confidence [C] in each class of log-odds [C, H, W]; those of classes with less become minus infinity."""
    confidence = scores.amax((1, 2)).sigmoid()
    scores[confidence < least] = -torch.inf
    return confidence


def decide(scores: Tensor, threshold: float, overlapping: bool) -> Tensor:
    """Label map uint8 [H, W] of log-odds [C, H, W], which are turned into probabilities in place.

    The most probable class takes a pixel where it reaches the threshold. A few rows at a time: a large photo would
    otherwise need several times its memory for intermediate results.
    """
    least = torch.tensor(threshold).logit()
    labels = torch.empty(scores.shape[1:], dtype=torch.uint8)
    step = max(1, PIXELS_AT_ONCE // scores.shape[2])
    for part, row in zip(scores.split(step, dim=1), labels.split(step), strict=True):
        best, winner = part.max(0)
        row.copy_(torch.where((best >= least) & best.isfinite(), winner + 1, 0))
        part.copy_(part.sigmoid() if overlapping else posterior(part))
    return labels


def posterior(scores: Tensor) -> Tensor:
    """Probabilities [C, H, W] of classes that compete with each other and the background, which has log-odds 0."""
    odds = scores.exp()
    return odds / (1 + odds.sum(0))


def _ahead(read: Callable[[_Item], _Read], items: Iterable[_Item]) -> Iterator[tuple[_Item, Future[_Read]]]:
    """Every item with the reading of it, which began while earlier ones were worked on; never many at once."""
    with ThreadPoolExecutor(READERS) as pool:
        waiting: deque[tuple[_Item, Future[_Read]]] = deque()
        for item in items:
            waiting.append((item, pool.submit(read, item)))
            if len(waiting) > READERS:
                yield waiting.popleft()
        yield from waiting
