"""`vat.runtime.Segmenter`: few-shot segmentation by an exported model, with the calls of `vat.Segmenter`."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vat.errors import VatError
from vat.files import write_atomically
from vat.images import ImageLike, image_size
from vat.predict.masks import MaskLike, example_mask
from vat.predict.results import Segmentation
from vat.predict.supports import as_examples
from vat.runtime.folder import ModelFolder
from vat.runtime.pixels import log_odds, network_input, posterior, resize_maps, shrink_mask, sigmoid
from vat.runtime.sessions import CPU, open_session

BATCH = 4  # examples that meet a photo in one call: they share its features, and each takes memory of its own
Features = dict[str, np.ndarray]  # name -> [N, ...], one entry for each example


class Segmenter:
    """Masks of photos, given a few labelled ones.

    Args:
        folder: what `vat export` wrote for a segmentation model.
        threads: of the CPU; by default all cores.
        providers: of onnxruntime, for other devices than the CPU.
        batch_size: how many examples meet a photo at once: more is faster and takes more memory.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        threads: int | None = None,
        providers: Sequence[str] = CPU,
        batch_size: int = BATCH,
    ) -> None:
        if batch_size < 1:
            raise VatError(f"batch_size is {batch_size}; it must be at least 1.")
        self.model = ModelFolder.read(Path(folder), "segmentation")
        self.batch_size = batch_size
        self._support, self._query = (
            open_session(self.model.graph_file(name), threads, providers) for name in ("support", "query")
        )
        self._classes: tuple[str, ...] = ()
        self._owners: np.ndarray = np.empty(0, dtype=np.int64)  # the class of each example
        self._features: Features = {}

    @property
    def classes(self) -> list[str]:
        """In the order of their numbers in label maps, which begin with 1."""
        return list(self._classes)

    @property
    def shots(self) -> dict[str, int]:
        """Class -> number of its examples."""
        return {name: int((self._owners == i).sum()) for i, name in enumerate(self._classes)}

    def fit(self, images: Any, masks: Any = None) -> Segmenter:
        """Learn from labelled photos, in place of all that was learnt before.

        `fit(images, masks)` with lists, or one of each, makes a class named "object";
        `fit({"cat": [(image, mask), ...], "dog": [...]})` several; `fit("examples/")` reads a folder.
        """
        examples = as_examples(images, masks)
        encoded = [self._encode(name, *pair) for name, pairs in examples.items() for pair in pairs]
        self._classes = tuple(examples)
        self._owners = np.repeat(np.arange(len(examples)), [len(pairs) for pairs in examples.values()])
        self._features = {name: np.concatenate([one[name] for one in encoded]) for name in encoded[0]}
        return self

    def _encode(self, name: str, image: ImageLike, mask: MaskLike) -> Features:
        inside = example_mask(image, mask, name)
        pixels = network_input(image, self.model.image_size, self.model.mean, self.model.std)
        feed = {"images": pixels, "masks": shrink_mask(inside, self.model.image_size)}
        names = [output.name for output in self._support.get_outputs()]
        return dict(zip(names, self._support.run(names, feed), strict=True))

    def predict(
        self, image: ImageLike, *, threshold: float = 0.5, overlapping: bool = False, min_confidence: float = 0.0
    ) -> Segmentation:
        """The masks of one photo, at its own size and orientation.

        Args:
            threshold: the least probability of foreground; higher gives smaller and surer masks.
            overlapping: let a pixel belong to several classes; by default they and the background compete for it.
            min_confidence: classes of which the result's `confidence` is less than this are taken not to be in the
                photo, and get no mask.
        """
        if not self._classes:
            raise VatError("Nothing was learnt yet: call fit with labelled examples first.")
        for name, value in (("threshold", threshold), ("min_confidence", min_confidence)):
            if not 0 <= value <= 1:
                raise VatError(f"{name} is {value}; it is a probability, from 0 to 1.")
        votes = sigmoid(self._log_odds(image))
        means = np.stack([votes[self._owners == i].mean(axis=0) for i in range(len(self._classes))])
        scores = resize_maps(log_odds(means), image_size(image))
        confidence = sigmoid(scores.max(axis=(1, 2)))
        scores[confidence < min_confidence] = -np.inf
        probabilities = sigmoid(scores)
        best = probabilities.max(axis=0)
        labels = np.where((best >= threshold) & (best > 0), scores.argmax(axis=0) + 1, 0)
        return Segmentation(
            classes=self._classes,
            label_map=labels.astype(np.uint8),
            probabilities=probabilities if overlapping else posterior(scores),
            source=image,
            name=Path(image).name if isinstance(image, str | os.PathLike) else None,
            threshold=threshold,
            overlapping=overlapping,
            confidence=dict(zip(self._classes, confidence.tolist(), strict=True)),
        )

    def _log_odds(self, image: ImageLike) -> np.ndarray:
        """Of the foreground, [N, h, w] on the decoder's grid, one map for each example."""
        pixels = network_input(image, self.model.image_size, self.model.mean, self.model.std)
        found = []
        for start in range(0, len(self._owners), self.batch_size):
            chunk = {name: values[start : start + self.batch_size] for name, values in self._features.items()}
            found.append(self._query.run(["log_odds"], {"images": pixels, **chunk})[0][0])
        return np.concatenate(found)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Keep what was learnt in one .npz file: features of the examples, no photos."""
        if not self._classes:
            raise VatError("Nothing was learnt yet: call fit with labelled examples first.")
        content = io.BytesIO()
        arrays: dict[str, Any] = {f"features/{name}": values for name, values in self._features.items()}
        model = np.array(self.model.checksum("support"))
        arrays |= {"classes": np.array(self._classes), "owners": self._owners, "model": model}
        np.savez(content, **arrays)
        write_atomically(Path(file), content.getvalue())

    def load(self, file: str | os.PathLike[str]) -> Segmenter:
        """Take up what :meth:`save` kept, by the same exported model."""
        try:
            with np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            model, classes, owners = str(arrays.pop("model")), arrays.pop("classes").tolist(), arrays.pop("owners")
            features = {name.removeprefix("features/"): values for name, values in arrays.items()}
            lengths = {len(values) for values in (owners, *features.values())}
            if lengths != {len(owners)} or set(owners.tolist()) != set(range(len(classes))):
                raise ValueError("examples without a class, or classes without an example")
        except FileNotFoundError:
            raise VatError(f"There is no file '{file}'.") from None
        except Exception:  # damaged archives raise many types
            raise VatError(f"'{file}' is not a file that vat.runtime.Segmenter.save wrote.") from None
        if model != self.model.checksum("support"):
            raise VatError(f"'{file}' was made with another model than '{self.model.path}'; fit the examples again.")
        self._classes, self._owners, self._features = tuple(classes), owners, features
        return self
