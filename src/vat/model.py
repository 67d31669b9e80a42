"""The network, end to end: images -> features -> cost -> aggregation -> decoder -> mask or flow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vat.aggregation import PyramidEncoder
from vat.config import VATConfig
from vat.cost import cost_volume, mask_on_grid
from vat.decoder import build_decoder
from vat.errors import VatError
from vat.features import Backbone, FeatureMaps
from vat.host_memory import release_freed
from vat.kernels.unit_features import unit_features, unit_features_reference
from vat.network import PairNetwork, flatten_shots
from vat.registry import register_family


@dataclass
class Encoded:
    """An image after the backbone: unit vectors for the cost, and maps for the appearance embedding.

    `stacked`: level -> [B, L, grid, grid, C]; `maps`: level -> last map [B, C, h, w] (query only).
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
            value = torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, output: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return output
        return output + 0.0 * sum(p.sum() for p in self.parameters())


@register_family("vat", VATConfig)
class VAT(PairNetwork):
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
        self._grids = {level.level: config.grid_of(level.level) for level in config.levels}

    def encode_query(self, images: Tensor, features: FeatureMaps | None = None) -> Encoded:
        """Features of the image to be masked (or of the target): [B, 3, H, W]."""
        features = self.backbone(images) if features is None else features
        stacked = {level: self._unit(features[level], grid) for level, grid in self._grids.items()}
        wanted = {stage.appearance for stage in self.config.stages if stage.appearance is not None}
        return Encoded(stacked, {level: features[level][-1] for level in wanted})

    def encode_support(
        self, images: Tensor, mask: Tensor | None = None, features: FeatureMaps | None = None
    ) -> Encoded:
        """Features of K examples [B, K, 3, H, W] (or [B, 3, H, W]) under their masks, to be reused for any query."""
        images, mask, shots = flatten_shots(images, mask)
        features = self.backbone(images) if features is None else features
        stacked = {}
        for level, grid in self._grids.items():
            weight = None if mask is None else mask_on_grid(mask.to(images.dtype), grid)
            stacked[level] = self._unit(features[level], grid, weight)
        return Encoded(stacked, {}, shots)

    def _unit(self, maps: list[Tensor], grid: int, mask: Tensor | None = None) -> Tensor:
        return (unit_features if self.fast else unit_features_reference)(maps, grid, mask)

    def decode(self, query: Encoded, support: Encoded, record: dict[str, Tensor] | None = None) -> Tensor:
        """Encoded images -> the network's output before the last resize, [B*K, 2, grid, grid]."""
        whole = Encoded(dict(query.stacked), query.maps), Encoded(dict(support.stacked), {}, support.shots)
        return self._decode(*whole, record)

    def decode_once(self, query: Encoded, support: Encoded) -> Tensor:
        return self._decode(query, support, None)

    def _decode(self, query: Encoded, support: Encoded, record: dict[str, Tensor] | None) -> Tensor:
        """Takes the stacked features away level by level, so that each is freed as soon as its cost is known."""
        query = query.expand(support.shots)
        if record is not None:
            for level in self._grids:
                record[f"cost_conv{level}"] = cost_volume(query.stacked[level], support.stacked[level])
        cost = self.encoder(query.stacked, support.stacked, record)
        release_freed(after=cost)
        return self.unused(self.decoder(cost, query.maps, record))

    def stages(self, query: Tensor, support: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Every intermediate result by name, volumes as [B, C, Hq, Wq, Hs, Ws]: `cost_conv5`, `vcm_conv5`,
        `vtm_conv5` (without its residual), ..., `atd_0`, ..., `output` (before the last resize). Stores cost volumes.
        """
        record: dict[str, Tensor] = {}
        output = self.decode(self.encode_query(query), self.encode_support(support, mask), record)
        for name, value in record.items():
            if name.startswith(("vcm", "vtm", "atd")):
                record[name] = value.movedim(-1, 1)
        return record | {"output": output}


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
