"""The pyramidal transformer encoder with Guided Pyramidal Processing (GPP).

A^p = VTM(M^p + up(A^{p+1})),  M^p = VCM(C^p),   each VTM wrapped in a residual
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vat.aggregation.embedding import EMBEDDINGS, VCM
from vat.aggregation.memory import MemoryGuard
from vat.aggregation.recompute import embed_again, mix_again
from vat.aggregation.vtm import AggregatorSpec, build_aggregator
from vat.config import LevelConfig, VATConfig
from vat.host_memory import release_freed
from vat.kernels.upsample import upsample_add, upsample_add_reference
from vat.resize import resize_tokens


class PositionEmbedding(nn.Module):
    """Learned; the first half of the channels depends on the query position, the second on the support position."""

    def __init__(self, dim: int, query_grid: int, support_grid: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(query_grid, query_grid, dim // 2))
        self.support = nn.Parameter(torch.empty(support_grid, support_grid, dim - dim // 2))
        nn.init.trunc_normal_(self.query, std=0.02)
        nn.init.trunc_normal_(self.support, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Add to tokens [B, Hq, Wq, Hs, Ws, D]."""
        _, hq, wq, hs, ws, _ = tokens.shape
        query = self.query[:, :, None, None].expand(hq, wq, hs, ws, -1)
        support = self.support[None, None].expand(hq, wq, hs, ws, -1)
        return tokens + torch.cat([query, support], dim=-1).to(tokens.dtype)


class EncoderLevel(nn.Module):
    """Embedding and aggregation of one pyramid level."""

    def __init__(self, layers: int, level: LevelConfig, config: VATConfig) -> None:
        super().__init__()
        query_grid, support_grid = level.out_grid()
        dim = level.channels[-1]
        self.residual, self.recompute = config.residual, False
        self.embed = EMBEDDINGS[config.embedding](layers, level)
        self.position = PositionEmbedding(dim, query_grid, support_grid) if config.position_embedding else None
        self.vtm = build_aggregator(config.aggregator, AggregatorSpec.of(level, config))

    def recomputes(self) -> bool:
        """Whether a backward pass will compute this level's activations again."""
        return self.recompute and torch.is_grad_enabled()

    def aggregate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """M^p -> (A^p, VTM's own output)."""
        if self.position is not None:
            tokens = self.position(tokens)
        aggregated = mix_again(self.vtm, tokens) if self.recomputes() else self.vtm(tokens)
        return (tokens + aggregated if self.residual else aggregated), aggregated


class PyramidEncoder(nn.Module):
    """Stacked features of both images -> aggregated cost, averaged over the support [B, Hq, Wq, D]."""

    def __init__(self, layers: dict[int, int], config: VATConfig) -> None:
        super().__init__()
        self.fast = True
        self.require_memory = MemoryGuard(config)
        self.gpp = config.gpp
        self.numbers = [level.level for level in config.levels]
        self.levels = nn.ModuleList(EncoderLevel(layers[lv.level], lv, config) for lv in config.levels)

    def forward(
        self, query: dict[int, Tensor], support: dict[int, Tensor], record: dict[str, Tensor] | None = None
    ) -> Tensor:
        """`query`, `support`: level -> [B, L, grid, grid, C], emptied on the way; `record` collects stages by name."""
        self.require_memory(query[self.numbers[0]], self.fast)
        outputs: list[Tensor] = []
        for number, module in zip(self.numbers, self.levels, strict=True):
            release_freed(after=query[number])
            embed = module.embed
            if module.recomputes():  # type: ignore[operator]
                tokens = embed_again(embed, query.pop(number), support.pop(number))  # type: ignore[arg-type]
            elif isinstance(embed, VCM) and embed.fast:
                inputs = embed.correlate(query.pop(number), support.pop(number))
                tokens = embed.convolve(inputs)  # a step of its own: the features may be freed before
            else:
                tokens = embed(query.pop(number), support.pop(number))  # type: ignore[operator]
            if record is not None:
                record[f"vcm_conv{number}"] = tokens
            if self.gpp and outputs:
                guide = upsample_add if self.fast else upsample_add_reference
                tokens = guide(tokens, outputs[-1])
            aggregated, vtm = module.aggregate(tokens)  # type: ignore[operator]
            if record is not None:
                record[f"vtm_conv{number}"] = vtm
            outputs.append(aggregated)
        if self.gpp:
            return outputs[-1].mean(dim=(3, 4))
        # Without guidance the levels meet only here, after the average over the support.
        averages = [a.mean(dim=(3, 4)) for a in outputs]
        size = averages[-1].shape[1:3]
        return torch.stack([resize_tokens(a, size) for a in averages]).sum(0)  # type: ignore[arg-type]
