"""Aggregated cost -> output map: the Affinity-aware Transformer Decoder (ATD, paper section 3.5) and its ablation AD.

m_q = ATD([A', P(F_q)])      A': cost averaged over the support, P(F_q): projected query features
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vat.aggregation.block import LayerNorm
from vat.aggregation.swin import swin_blocks
from vat.config import StageConfig, VATConfig
from vat.errors import VatError
from vat.resize import resize, resize_tokens


class Appearance(nn.Module):
    """P(F_q): 1x1 convolution and ReLU on the query's last map of a level, at the level's grid, then the stage's.

    A 1x1 convolution and a bilinear resize may change places: each mixes what the other leaves alone, and the weights
    of a resize sum to one, so that a bias passes through. After the convolution there are far fewer channels to resize.
    """

    def __init__(self, in_channels: int, out_channels: int, grid: int) -> None:
        super().__init__()
        self.fast, self.grid = True, grid
        self.proj = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, maps: Tensor, grid: int) -> Tensor:
        """[B, C, h, w] -> [B, c, grid, grid]."""
        projected = resize(self.proj(maps), self.grid) if self.fast else self.proj(resize(maps, self.grid))
        return resize(F.relu(projected), grid)


class DecoderStage(nn.Module):
    """x + swin(x) at one grid, then (but for the last stage) a 1x1 convolution."""

    def __init__(self, dim: int, stage: StageConfig, config: VATConfig, transformer: bool) -> None:
        super().__init__()
        self.blocks: nn.Sequential | None = None
        if transformer:
            window = (config.decoder_window, config.decoder_window, 1, 1)
            self.blocks = swin_blocks(dim, config.decoder_heads, window, config.decoder_depth, config.mlp_ratio)
            self.norm = LayerNorm(dim)
        self.proj = None if stage.out_dim is None else nn.Linear(dim, stage.out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, h, w, C] -> [B, h, w, C']."""
        if self.blocks is not None:
            x = x + self.norm(self.blocks(x[:, :, :, None, None])[:, :, :, 0, 0])
        return x if self.proj is None else self.proj(x)


class AffinityDecoder(nn.Module):
    """`forward(cost [B, h, w, D], appearance maps by level) -> [B, 2, grid, grid]`: logits, or a map in [-1, 1]."""

    def __init__(self, channels: dict[int, int], config: VATConfig, transformer: bool = True) -> None:
        super().__init__()
        self.stage_configs = config.stages
        self.dropout = config.appearance_dropout
        dim = config.dim
        appearances: dict[str, nn.Module] = {}
        stages = []
        for i, stage in enumerate(config.stages):
            if stage.appearance is not None:
                grid = config.grid_of(stage.appearance)
                appearances[str(i)] = Appearance(channels[stage.appearance], stage.appearance_dim, grid)
                dim += stage.appearance_dim
            stages.append(DecoderStage(dim, stage, config, transformer))
            dim = stage.out_dim or dim
        self.appearances = nn.ModuleDict(appearances)
        self.stages = nn.ModuleList(stages)
        self.head = nn.Sequential(
            nn.Conv2d(dim, config.head_dim, 3, padding=1), nn.ReLU(), nn.Conv2d(config.head_dim, 2, 3, padding=1)
        )

    def forward(self, cost: Tensor, maps: dict[int, Tensor], record: dict[str, Tensor] | None = None) -> Tensor:
        embeddings = self._embed(maps)
        x = cost
        for i, (stage, settings) in enumerate(zip(self.stages, self.stage_configs, strict=True)):
            x = resize_tokens(x, settings.grid)
            if i in embeddings:
                x = torch.cat([x, embeddings[i].permute(0, 2, 3, 1)], dim=-1)
            x = stage(x)
            if record is not None:
                record[f"atd_{i}"] = x
        return self.head(x.permute(0, 3, 1, 2))

    def _embed(self, maps: dict[int, Tensor]) -> dict[int, Tensor]:
        """Stage -> appearance embedding. In training whole channels of all but the finest one are dropped."""
        embeddings = {}
        for name, module in self.appearances.items():
            i = int(name)
            settings = self.stage_configs[i]
            assert settings.appearance is not None
            embedding = module(maps[settings.appearance], settings.grid)
            if i < len(self.stage_configs) - 1:
                embedding = F.dropout2d(embedding, self.dropout, self.training)
            embeddings[i] = embedding
        return embeddings


class ConvDecoder(nn.Module):
    """HSNet's decoder: 2D convolutions on the cost alone, twice its grid at the end."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.coarse = nn.Sequential(
            nn.Conv2d(dim, dim, 3, padding=1), nn.ReLU(), nn.Conv2d(dim, half, 3, padding=1), nn.ReLU()
        )
        self.fine = nn.Sequential(nn.Conv2d(half, half, 3, padding=1), nn.ReLU(), nn.Conv2d(half, 2, 3, padding=1))

    def forward(
        self, cost: Tensor, maps: dict[int, Tensor] | None = None, record: dict[str, Tensor] | None = None
    ) -> Tensor:
        """[B, h, w, D] -> logits [B, 2, 2h, 2w]; appearance maps are not looked at."""
        x = self.coarse(cost.permute(0, 3, 1, 2))
        return self.fine(resize(x, (2 * x.shape[-2], 2 * x.shape[-1])))


Decoder = Callable[[dict[int, int], VATConfig], nn.Module]
DECODERS: dict[str, Decoder] = {}


def register_decoder(name: str) -> Callable[[Decoder], Decoder]:
    """Make a decoder available as `VATConfig(decoder=name)`.

    It is built from the channels of each level's last map and the configuration, and is called as
    `decoder(cost [B, h, w, D], maps by level, record) -> [B, 2, h', w']`; the maps have the backbone's own sizes.
    """

    def add(build: Decoder) -> Decoder:
        DECODERS[name] = build
        return build

    return add


def build_decoder(channels: dict[int, int], config: VATConfig) -> nn.Module:
    """The decoder named by the configuration."""
    if config.decoder not in DECODERS:
        raise VatError(f"There is no decoder {config.decoder!r}; there are: {', '.join(sorted(DECODERS))}.")
    return DECODERS[config.decoder](channels, config)


@register_decoder("atd")
def atd(channels: dict[int, int], config: VATConfig) -> nn.Module:
    """The paper's choice."""
    return AffinityDecoder(channels, config)


@register_decoder("ad")
def ad(channels: dict[int, int], config: VATConfig) -> nn.Module:
    """The ATD without its transformers (paper, "Ablation study for ATD")."""
    return AffinityDecoder(channels, config, transformer=False)


@register_decoder("hsnet")
def hsnet(channels: dict[int, int], config: VATConfig) -> nn.Module:
    """HSNet's, for the ablations."""
    if config.task == "correspondence":
        raise VatError("The decoder 'hsnet' gives masks and no flow; for correspondence use 'atd'.")
    return ConvDecoder(config.dim)
