"""The network, end to end: images -> features -> cost -> aggregation -> decoder -> mask or flow."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from vat.prototype import prototype_logits, unit_prototypes
from vat.registry import register_family
from vat.resize import resize


@dataclass
class Encoded:
    """An image after the backbone: unit vectors for the cost, and maps for the appearance embedding.

    `stacked`: level -> [B, L, grid, grid, C]; `maps`: level -> last map [B, C, h, w] (query only); `prototypes`:
    unit vectors [B, L, 2, C] of background and foreground on the coarsest level (support only, where they count).
    """

    stacked: dict[int, Tensor]
    maps: dict[int, Tensor]
    shots: int = 1
    prototypes: Tensor | None = None

    def kept(self) -> Encoded:
        """The same, of which stacked features may be taken away while this one keeps them."""
        return replace(self, stacked=dict(self.stacked))

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

    With `config.prototype_weight` w > 0, which is not of the paper, a trained network is joined by what needs no
    training: logits = decoder(...) + w * 20 cos(F_q, p), p the mean vectors of F_s outside and inside of the mask on
    the coarsest level. Training leaves them out: a decoder that may lean on them learns less of its own.
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
        if mask is None or not self.config.prototype_weight:
            return Encoded(stacked, {}, shots)
        return Encoded(stacked, {}, shots, unit_prototypes(features[self.config.levels[0].level], mask))

    def _unit(self, maps: list[Tensor], grid: int, mask: Tensor | None = None) -> Tensor:
        return (unit_features if self.fast else unit_features_reference)(maps, grid, mask)

    def decode(self, query: Encoded, support: Encoded, record: dict[str, Tensor] | None = None) -> Tensor:
        """Encoded images -> the network's output before the last resize, [B*K, 2, grid, grid]."""
        return self._decode(query.kept(), support.kept(), record)

    def decode_once(self, query: Encoded, support: Encoded) -> Tensor:
        return self._decode(query, support, None)

    def _decode(self, query: Encoded, support: Encoded, record: dict[str, Tensor] | None) -> Tensor:
        """Takes the stacked features away level by level, so that each is freed as soon as its cost is known."""
        query = query.expand(support.shots)
        if record is not None:
            for level in self._grids:
                record[f"cost_conv{level}"] = cost_volume(query.stacked[level], support.stacked[level])
        beside = None
        if support.prototypes is not None and not self.training:
            beside = prototype_logits(query.stacked[self.config.levels[0].level], support.prototypes)
        cost = self.encoder(query.stacked, support.stacked, record)
        release_freed(after=cost)
        output = self.unused(self.decoder(cost, query.maps, record))
        if beside is None:
            return output
        size = (int(output.shape[-2]), int(output.shape[-1]))
        return output + self.config.prototype_weight * resize(beside, size).to(output.dtype)

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


def with_prototypes(network: PairNetwork, weight: float) -> PairNetwork:
    """The same network, its configuration telling that prototypes count, and how much; 0 leaves them out."""
    if not isinstance(network, VAT) or network.config.task != "segmentation":
        raise VatError(f"Prototypes may stand beside VAT's masks, not beside what a model of {network.family!r} gives.")
    if weight < 0:
        raise VatError(f"The weight of the prototypes is {weight}; it is 0 or more.")
    network.config = replace(network.config, prototype_weight=weight)
    return network


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
    raise VatError(f"There is no voting rule {rule!r}; there are: paper, published, and mean for logits.")


def merge(logits: Tensor, rule: str = "mean") -> Tensor:
    """Logits of K predictions [B, K, 2, H, W] -> one mask [B, H, W].

    `mean`: foreground where the mean of the K log-odds is positive, so that a sure prediction outweighs an unsure one;
    other rules are those of :func:`vote`.
    """
    if rule == "mean":
        return logits.mean(1).argmax(1).bool()
    return vote(logits.argmax(2), rule)


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
