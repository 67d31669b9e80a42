"""A network made ready for photos: device, precision, resizing, and one pass of a query against all examples."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vat.builtin import BUILTIN, is_builtin
from vat.checkpoint import load
from vat.errors import VatError
from vat.images import ImageLike, read_image, to_tensor
from vat.network import PairNetwork
from vat.predict.encodings import Encoding, length, spread
from vat.resize import resize_photo
from vat.runner import GraphCache, accelerate
from vat.self_support import SelfSupport

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIN_SIDE, MAX_SIDE = 32, 4096


class Engine:
    """Runs a network on single photos, one pass at a time: threads take turns, so that memory stays that of one.

    On a GPU the passes are replayed as CUDA graphs. `name` is that of a built-in model, or None.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PairNetwork,
        task: str,
        device: str | torch.device = "auto",
        precision: str = "auto",
        image_size: int | None = None,
    ) -> None:
        self.name = str(model) if is_builtin(model) else None
        self.device = choose_device(device)
        self.dtype = choose_precision(precision, self.device)
        network = model if isinstance(model, PairNetwork) else _load(model)
        if self.name is not None:  # weights as they were trained are in the package; here they would be a second copy
            network.backbone = network.backbone.folded()
        if network.config.task != task:
            title = "This model" if isinstance(model, PairNetwork) else f"The model '{os.fspath(model)}'"
            raise VatError(f"{title} is for {network.config.task}; for {task} take another one (see `vat models`).")
        self.network = _on_device(network, self.device)
        self.image_size = network.config.image_size if image_size is None else image_size
        if not MIN_SIDE <= self.image_size <= MAX_SIDE:
            raise VatError(f"image_size is {self.image_size}; it must lie between {MIN_SIDE} and {MAX_SIDE}.")
        self._model = accelerate(self.network, dtype=self.dtype).model
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Drop recorded passes, which hold on to the examples they were recorded with."""
        self._graphs = GraphCache() if self.device.type == "cuda" else None

    def encode_example(self, image: Tensor, mask: np.ndarray) -> Encoding:
        """A photo uint8 [3, H, W] under its mask bool [h, w] -> features, to be met by any query."""
        inside = shrink_mask(mask, self.image_size).to(self.device, self.dtype)
        with self._lock, torch.inference_mode():
            return self._model.encode_support(self._input(image, self.image_size), inside[None])

    def margins(
        self,
        view: Tensor,
        chunks: tuple[Encoding, ...],
        scale: float = 1.0,
        owners: tuple[int, ...] = (),
        self_support: SelfSupport | None = None,
    ) -> Tensor:
        """How far foreground is ahead of background: calibrated log-odds float32 [N, h, w], one map for each of the
        N examples in the chunks.

        The view, uint8 [3, H, W], is encoded once; chunks of examples are decoded one after the other. With
        `self_support` the view is looked at again for each class; `owners` has the class of every example.
        """
        temperature = self.network.temperature

        def run(images: Tensor) -> Tensor:
            features = None if self_support is None else self._model.extract(images)
            query = self._model.encode_query(images, features)
            outputs = [self._model.decode(spread(query, length(chunk)), chunk).float() for chunk in chunks]
            margins = torch.cat([(output[:, 1] - output[:, 0]) / temperature for output in outputs])
            if self_support is None:
                return margins
            return self_support.by_class(self._model, images, features, query, margins, owners)

        return self._pass((("margins", self_support), chunks), run, self._input(view, round(scale * self.image_size)))

    def flows(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Flows float32 [2, g, g] in cells between photos uint8 [3, H, W]: from source to target, and back.

        The backbone sees each photo once.
        """

        def run(*images: Tensor) -> Tensor:
            features = [self._model.extract(x) for x in images]
            queries = [self._model.encode_query(x, f) for x, f in zip(images, features, strict=True)]
            examples = [self._model.encode_support(x, None, f) for x, f in zip(images, features, strict=True)]
            outputs = [self._model.decode(queries[i], examples[1 - i]).float() for i in (0, 1)]
            return torch.cat([self._model.finish(output, images[0].shape[-2:]) for output in outputs])

        inputs = (self._input(photo, self.image_size) for photo in (source, target))
        there, back = self._pass("flows", run, *inputs)
        return there, back

    def _input(self, image: Tensor, side: int) -> Tensor:
        """uint8 [3, H, W] -> normalised [1, 3, side, side]. The aspect ratio is not kept, as in training."""
        square = resize_photo(image, side)
        return self.network.normalize(square.to(self.device)[None]).to(self.dtype)

    @torch.inference_mode()
    def _pass(self, owner: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        with self._lock:
            output = function(*inputs) if self._graphs is None else self._graphs(owner, function, inputs)
            return output.cpu()


def choose_device(device: str | torch.device) -> torch.device:
    """The device of a name; "auto" is CUDA, else MPS, else the CPU."""
    if device == "auto":
        kinds = ("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()), ("cpu", True)
        return torch.device(next(kind for kind, found in kinds if found))
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise VatError(f"There is no device {device!r}; there are: auto, cpu, cuda, cuda:0, mps.") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise VatError(f"The device {device!r} was asked for, but CUDA finds {torch.cuda.device_count()} of them.")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise VatError("The device 'mps' was asked for, but this computer has none.")
    return chosen


def choose_precision(precision: str, device: torch.device) -> torch.dtype:
    """The type of a name; "auto" is bfloat16 on CUDA and float32 elsewhere."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if precision not in PRECISIONS:
        raise VatError(f"There is no precision {precision!r}; there are: auto, {', '.join(PRECISIONS)}.")
    return PRECISIONS[precision]


def read_pixels(image: ImageLike, at_least: int) -> Tensor:
    """An upright photo as uint8 [3, H, W]; large JPEG files are decoded at a fraction of their size."""
    return to_tensor(read_image(image, at_least=at_least))


def shrink_mask(mask: np.ndarray, side: int) -> Tensor:
    """bool [h, w] -> float32 [side, side], nearest pixels as in training; an object too thin for that is kept."""
    values = torch.from_numpy(np.ascontiguousarray(mask)).float()[None]
    nearest = F.interpolate(values[None], (side, side), mode="nearest")[0]
    return nearest[0] if nearest.any() else F.adaptive_max_pool2d(values, side)[0]


def _load(model: str | os.PathLike[str]) -> PairNetwork:
    if not is_builtin(model) and not os.path.exists(model):
        names = ", ".join(BUILTIN)
        raise VatError(f"There is no file or built-in model '{os.fspath(model)}'; the built-in ones are: {names}.")
    return load(model)


def _on_device(network: PairNetwork, device: torch.device) -> PairNetwork:
    """The network itself if it is there already; otherwise a copy, since its owner may still want it where it is."""
    if next(network.parameters()).device == torch.empty(0, device=device).device:
        return network
    return copy.deepcopy(network).to(device)
