"""What all models that compare two images have in common: how they are called, checked and switched.

    segmentation:    model(query, support, mask) -> logits
    correspondence:  model(target, source) -> flow

A model is three steps, which callers may also take one by one to encode an image only once:
`decode(encode_query(query), encode_support(support, mask))`, then `finish`.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vat.config import Backend
from vat.errors import VatError
from vat.features import Backbone
from vat.resize import resize


class PairNetwork(nn.Module):
    """A subclass sets `config` (with `task`) and `backbone`, and defines the three steps.

    What `encode_support` returns must have `shots`, the number of supports of each query.
    """

    family: str  # its name in the registry
    config: Any
    backbone: Backbone

    def __init__(self) -> None:
        super().__init__()
        self.fast = True
        self.backend: Backend = "auto"

    @property
    def temperature(self) -> float:
        """What logits are divided by to become calibrated; families that keep none have 1."""
        return float(getattr(self.config, "temperature", 1.0))

    def extract(self, images: Tensor) -> Any:
        """Images [B, 3, H, W] -> feature maps [B, C, h, w] in dicts or lists."""
        return self.backbone(images)

    def encode_query(self, images: Tensor, features: Any = None) -> Any:
        """The image to be masked (or the target), [B, 3, H, W]; `features`: those of `extract`, if known."""
        raise NotImplementedError

    def encode_support(self, images: Tensor, mask: Tensor | None = None, features: Any = None) -> Any:
        """K examples [B, K, 3, H, W] (or [B, 3, H, W]) under their masks, to be reused for any query."""
        raise NotImplementedError

    def decode(self, query: Any, support: Any, record: dict[str, Tensor] | None = None) -> Tensor:
        """Encoded images -> the output before the last resize, [B*K, 2, h, w]; `record` collects stages."""
        raise NotImplementedError

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 or [0, 1] images [..., 3, H, W] to the backbone's own mean and std."""
        return self.backbone.normalize(images)

    def forward(self, query: Tensor, support: Tensor, mask: Tensor | None = None) -> Tensor:
        """Segmentation: logits [B, 2, H, W] at the query's size, or [B, K, 2, H, W] for supports
        [B, K, 3, h, w] with masks [B, K, h, w]. Correspondence: `query` is the target, `support` the source;
        flow [B, 2, grid, grid] in cells.
        """
        self._check(query, support, mask)
        query_features, support_features = self._features_of_both(query, support)
        examples = self.encode_support(support, mask, support_features)
        shots = examples.shots if support.ndim == 5 else None
        both = (self.encode_query(query, query_features), examples)
        del examples, query_features, support_features  # the maps are needed no more, and they are large
        return self.finish(self.decode_once(*both), query.shape[-2:], shots)

    def decode_once(self, query: Any, support: Any) -> Tensor:
        """`decode` of images that nobody needs afterwards; a model may empty them on the way."""
        return self.decode(query, support)

    def finish(self, output: Tensor, size: Any, shots: int | None = None) -> Tensor:
        """The output of `decode` as logits at `size`, or as a flow."""
        if self.config.task == "correspondence":
            return flow_from_map(output)
        logits = resize(output, (int(size[0]), int(size[1])))
        return logits if shots is None else logits.unflatten(0, (-1, shots))

    def stages(self, query: Tensor, support: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Every intermediate result by name, volumes as [B, C, Hq, Wq, Hs, Ws], and `output`."""
        record: dict[str, Tensor] = {}
        output = self.decode(self.encode_query(query), self.encode_support(support, mask), record)
        return record | {"output": output}

    def set_backend(self, backend: Backend) -> Self:
        """`reference`: every step by its definition; `fast` and `auto`: fused kernels of the same result."""
        if backend not in ("auto", "fast", "reference"):
            raise VatError(f"There is no backend {backend!r}; there are: auto, fast, reference.")
        self.backend = backend
        for module in self.modules():
            if hasattr(module, "fast"):
                module.fast = backend != "reference"  # type: ignore[assignment]
        return self

    def set_recompute(self, recompute: bool) -> Self:
        """In training, compute the encoder's activations again in the backward pass instead of keeping them."""
        for module in self.modules():
            if hasattr(module, "recompute"):
                module.recompute = recompute  # type: ignore[assignment]
        return self

    def _features_of_both(self, query: Tensor, support: Tensor) -> tuple[Any, Any]:
        """On a GPU images of one size share a pass of the backbone; a CPU prefers the smaller peak memory."""
        examples, _, _ = flatten_shots(support)
        if not query.is_cuda or query.shape[-2:] != examples.shape[-2:]:
            return None, None
        features = self.extract(torch.cat([query, examples]))
        count = query.shape[0]
        return tree_map(lambda m: m[:count], features), tree_map(lambda m: m[count:], features)

    def _check(self, query: Tensor, support: Tensor, mask: Tensor | None) -> None:
        if self.config.task == "correspondence" and mask is not None:
            raise VatError("A correspondence model takes (target, source) and no mask.")
        if self.config.task == "segmentation" and mask is None:
            raise VatError("A segmentation model takes (query, support, mask); the mask is missing.")
        if query.ndim != 4 or support.ndim not in (4, 5):
            raise VatError(
                f"The query must be [B, 3, H, W] and the support [B, 3, H, W] or [B, K, 3, H, W], "
                f"not {list(query.shape)} and {list(support.shape)}."
            )
        if query.shape[0] != support.shape[0]:
            raise VatError(
                f"{query.shape[0]} queries meet {support.shape[0]} supports; give one support set per query."
            )
        if mask is not None and mask.shape != support.shape[:-3] + support.shape[-2:]:
            raise VatError(
                f"The mask {list(mask.shape)} does not fit the support {list(support.shape)}: same size, no channel."
            )


def flatten_shots(images: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None, int]:
    """K supports of every episode as one batch: images [B*K, 3, H, W], masks [B*K, H, W], and K."""
    if images.ndim == 4:
        return images, mask, 1
    return images.flatten(0, 1), None if mask is None else mask.flatten(0, 1), images.shape[1]


def flow_from_map(output: Tensor) -> Tensor:
    """A map [B, 2, h, w] of positions normalised to [-1, 1] (x, y) -> flow in grid cells, target to source."""
    _, _, height, width = output.shape
    x = torch.arange(width, device=output.device, dtype=output.dtype)
    y = torch.arange(height, device=output.device, dtype=output.dtype)[:, None]
    return torch.stack([(output[:, 0] + 1) * ((width - 1) / 2) - x, (output[:, 1] + 1) * ((height - 1) / 2) - y], dim=1)
