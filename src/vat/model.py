"""The network, end to end: images -> features -> cost -> aggregation -> decoder -> mask or flow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vat.aggregation import PyramidEncoder
from vat.config import Backend, VATConfig
from vat.cost import cost_volume, mask_on_grid
from vat.decoder import build_decoder
from vat.errors import VatError
from vat.features import Backbone, FeatureMaps
from vat.kernels.unit_features import unit_features, unit_features_reference
from vat.registry import register_family
from vat.resize import resize


@dataclass
class Encoded:
    """An image after the backbone: unit vectors for the cost, and maps for the appearance embedding.

    `stacked`: level -> [B, L, grid, grid, C]; `maps`: level -> last map [B, C, grid, grid] (query only).
    """

    stacked: dict[int, Tensor]
    maps: dict[int, Tensor]
    shots: int = 1

    def expand(self, shots: int) -> Encoded:
        """Every entry repeated `shots` times, to meet the K supports of its episode."""
        if shots == 1:
            return self
        return Encoded(
            {level: t.repeat_interleave(shots, 0) for level, t in self.stacked.items()},
            {level: t.repeat_interleave(shots, 0) for level, t in self.maps.items()},
        )


class Unused(nn.Module):
    """Tensors that the published files hold, and the published parameter counts include, but no output depends on.

    In training their zero-weighted sum joins the output, so that every learnable tensor has a (zero) gradient, which
    is what distributed training expects.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)))

    def forward(self, output: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return output
        return output + 0.0 * sum(p.sum() for p in self.parameters())


@register_family("vat", VATConfig)
class VAT(nn.Module):
    """Volumetric Aggregation with Transformers.

    Segmentation: `model(query, support, mask) -> logits`; correspondence: `model(target, source) -> flow`. Images are
    normalised (`model.normalize`) and may have any size; support and query sizes may differ.
    """

    def __init__(self, config: VATConfig, backbone_weights: str | Path | bool | None = None) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config.backbone, backbone_weights, frozen=config.frozen_backbone)
        counts = {level: len(channels) for level, channels in self.backbone.channels.items()}
        last = {level: channels[-1] for level, channels in self.backbone.channels.items()}
        self.encoder = PyramidEncoder(counts, config)
        self.decoder = build_decoder(last, config)
        self.unused = Unused(_unused_shapes(config, last))
        self._grids = {level.level: level.grid for level in config.levels}
        self.fast = True
        self.backend: Backend = "auto"
        self.set_backend("auto")

    # -- the parts, in order -----------------------------------------------------------------------------------------

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 or [0, 1] images [..., 3, H, W] to the backbone's own mean and std."""
        return self.backbone.normalize(images)

    def encode_query(self, images: Tensor, features: FeatureMaps | None = None) -> Encoded:
        """Features of the image to be masked (or of the target): [B, 3, H, W]."""
        features = self.backbone(images) if features is None else features
        stacked = {level: self._unit(features[level], grid) for level, grid in self._grids.items()}
        wanted = {stage.appearance for stage in self.config.stages if stage.appearance is not None}
        maps = {
            level: resize(features[level][-1], self._grids.get(level, self.config.appearance_grid)) for level in wanted
        }
        return Encoded(stacked, maps)

    def encode_support(
        self, images: Tensor, mask: Tensor | None = None, features: FeatureMaps | None = None
    ) -> Encoded:
        """Features of K examples [B, K, 3, H, W] (or [B, 3, H, W]) under their masks, to be reused for any query."""
        shots = 1
        if images.ndim == 5:
            shots = images.shape[1]
            images = images.flatten(0, 1)
            mask = mask.flatten(0, 1) if mask is not None else None
        features = self.backbone(images) if features is None else features
        stacked = {}
        for level, grid in self._grids.items():
            weight = None if mask is None else mask_on_grid(mask.to(images.dtype), grid)
            stacked[level] = self._unit(features[level], grid, weight)
        return Encoded(stacked, {}, shots)

    def _unit(self, maps: list[Tensor], grid: int, mask: Tensor | None = None) -> Tensor:
        return (unit_features if self.fast else unit_features_reference)(maps, grid, mask)

    def _features_of_both(self, query: Tensor, support: Tensor) -> tuple[FeatureMaps | None, FeatureMaps | None]:
        """On a GPU images of one size go through the backbone together; a CPU prefers the smaller peak memory."""
        examples = support.flatten(0, 1) if support.ndim == 5 else support
        if not query.is_cuda or query.shape[-2:] != examples.shape[-2:]:
            return None, None
        levels = self.backbone(torch.cat([query, examples]))
        count = query.shape[0]
        return (
            {level: [m[:count] for m in maps] for level, maps in levels.items()},
            {level: [m[count:] for m in maps] for level, maps in levels.items()},
        )

    def decode(
        self, query: Encoded, support: Encoded, record: dict[str, Tensor] | None = None, dispose: bool = False
    ) -> Tensor:
        """Encoded images -> the network's output before the last resize, [B*K, 2, grid, grid].

        `record` collects intermediate results; `dispose` empties the encoded images as they are used.
        """
        query = query.expand(support.shots)
        if record is not None:
            for level in self._grids:
                record[f"cost_conv{level}"] = cost_volume(query.stacked[level], support.stacked[level])
        stacks = (query.stacked, support.stacked) if dispose else (dict(query.stacked), dict(support.stacked))
        cost = self.encoder(*stacks, record)
        return self.unused(self.decoder(cost, query.maps, record))

    # -- the whole ---------------------------------------------------------------------------------------------------

    def forward(self, query: Tensor, support: Tensor, mask: Tensor | None = None) -> Tensor:
        """Segmentation: logits [B, 2, H, W] at the query's size, or [B, K, 2, H, W] for supports [B, K, 3, h, w] with
        masks [B, K, h, w]. Correspondence: `query` is the target, `support` the source; flow [B, 2, grid, grid] in cells.
        """
        self._check(query, support, mask)
        query_features, support_features = self._features_of_both(query, support)
        examples = self.encode_support(support, mask, support_features)
        shots = examples.shots if support.ndim == 5 else None
        both = (self.encode_query(query, query_features), examples)
        # `decode` takes them level by level and lets go of what it has used; nothing here may hold on to it.
        del examples, query_features, support_features
        return self.finish(self.decode(*both, dispose=True), query.shape[-2:], shots)

    def finish(self, output: Tensor, size: Any, shots: int | None = None) -> Tensor:
        """The decoder's output as logits at `size`, or as a flow."""
        if self.config.task == "correspondence":
            return flow_from_map(output)
        logits = resize(output, (int(size[0]), int(size[1])))
        return logits if shots is None else logits.unflatten(0, (-1, shots))

    def stages(self, query: Tensor, support: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Every intermediate result by name, volumes as [B, C, Hq, Wq, Hs, Ws]: `cost_conv5`, `vcm_conv5`,
        `vtm_conv5` (without its residual), ..., `atd_0`, ..., `output` (before the last resize). Stores the cost volumes.
        """
        record: dict[str, Tensor] = {}
        output = self.decode(self.encode_query(query), self.encode_support(support, mask), record)
        for name, value in record.items():
            if name.startswith(("vcm", "vtm", "atd")):
                record[name] = value.movedim(-1, 1)
        return record | {"output": output}

    def set_backend(self, backend: Backend) -> VAT:
        """`reference`: every step by its definition; `fast` (and `auto`): fused kernels of the same result."""
        if backend not in ("auto", "fast", "reference"):
            raise VatError(f"There is no backend {backend!r}; there are: auto, fast, reference.")
        self.backend = backend
        for module in self.modules():
            if hasattr(module, "fast"):
                module.fast = backend != "reference"
        return self

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
            raise VatError(f"{query.shape[0]} queries meet {support.shape[0]} supports; give one support set per query.")
        if mask is not None and mask.shape != support.shape[:-3] + support.shape[-2:]:
            raise VatError(
                f"The mask {list(mask.shape)} does not fit the support {list(support.shape)}: same size, no channel."
            )


def flow_from_map(output: Tensor) -> Tensor:
    """A map [B, 2, h, w] of positions normalised to [-1, 1] (x, y) -> flow in grid cells, target to source."""
    _, _, height, width = output.shape
    y, x = torch.meshgrid(
        torch.arange(height, device=output.device, dtype=output.dtype),
        torch.arange(width, device=output.device, dtype=output.dtype),
        indexing="ij",
    )
    scale = torch.tensor([width - 1, height - 1], device=output.device, dtype=output.dtype).view(2, 1, 1)
    return (output + 1) * scale / 2 - torch.stack([x, y])


def vote(masks: Tensor, rule: str = "paper", threshold: float = 0.5) -> Tensor:
    """K binary masks [B, K, H, W] -> one [B, H, W].

    `paper`: foreground where the share of votes exceeds the threshold. `published`, as the released evaluation code
    does: votes divided by the largest number of votes in the image (not by K), and >= the threshold.
    """
    votes = masks.to(torch.float32).sum(1)
    if rule == "paper":
        return votes / masks.shape[1] > threshold
    if rule == "published":
        most = votes.amax(dim=(-2, -1), keepdim=True)
        return votes / most.clamp_min(1) >= threshold
    raise VatError(f"There is no voting rule {rule!r}; there are: paper, published.")


def _unused_shapes(config: VATConfig, channels: dict[int, int]) -> dict[str, tuple[int, ...]]:
    """Final norms of the 4D transformers, and appearance projections of stages that go without."""
    if not config.carry_unused:
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for i, level in enumerate(config.levels):
        shapes[f"norm{i}_weight"] = shapes[f"norm{i}_bias"] = (level.channels[-1],)
    for i, stage in enumerate(config.stages):
        if stage.appearance is None:
            # Where a stage has no embedding, the published files still hold the projection of the default level.
            level_number = len(config.stages) + 1 - i
            shapes[f"appearance{i}_weight"] = (stage.appearance_dim, channels[level_number], 1, 1)
            shapes[f"appearance{i}_bias"] = (stage.appearance_dim,)
    return shapes
