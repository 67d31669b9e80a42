"""`Segmenter`: from a few labelled photos to the masks of any others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from vat.images import ImageLike
from vat.network import PairNetwork
from vat.predict.masks import MaskLike
from vat.predict.results import Segmentation

Tiles = int | Literal["auto"] | None
OnError = Literal["raise", "skip"] | Callable[[Path, Exception], None]


class Segmenter:
    """Few-shot segmentation without tensors."""

    def __init__(
        self,
        model: str | os.PathLike[str] | PairNetwork = "vat-mini",
        device: str | torch.device = "auto",
        *,
        precision: str = "auto",
        image_size: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def classes(self) -> list[str]: ...

    @property
    def shots(self) -> dict[str, int]: ...

    def fit(self, images: Any, masks: Any = None) -> Segmenter:
        """(images, masks), {class: [(image, mask), ...]}, or a folder that `read_supports` understands; replaces."""
        raise NotImplementedError

    def add(self, name: str, image: ImageLike, mask: MaskLike) -> Segmenter:
        """One more example of a class, new or known; the others are not encoded again."""
        raise NotImplementedError

    def predict(
        self,
        image: ImageLike,
        *,
        threshold: float = 0.5,
        overlapping: bool = False,
        tiles: Tiles = None,
        scales: Sequence[float] = (1.0,),
        flip: bool = False,
    ) -> Segmentation:
        raise NotImplementedError

    def predict_batch(self, images: Iterable[ImageLike], **options: Any) -> list[Segmentation]:
        raise NotImplementedError

    def predict_folder(
        self, folder: str | os.PathLike[str], recursive: bool = True, on_error: OnError = "raise", **options: Any
    ) -> Iterator[Segmentation]:
        raise NotImplementedError

    def save(self, file: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        raise NotImplementedError

    @classmethod
    def load(
        cls, file: str | os.PathLike[str], device: str | torch.device = "auto", *, precision: str = "auto"
    ) -> Segmenter:
        raise NotImplementedError
