"""A network in a form that other runtimes run fast: the same function, made of few, large, standard operations.

The reference path exports as it is, but its windows are cut by pads, rolls and ten-axis transposes, and its volumes
change their layout around every convolution; an ONNX runtime executes each of these as a copy. Here windows are
gathered by constant indices, heads have weights of their own, masks are two small factors of the scores, and volumes
keep the layout that the convolution over the support reads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vat.aggregation.embedding import VCM, Conv4d
from vat.aggregation.swin import WindowAttention
from vat.features import Backbone
from vat.kernels.window_attention import OTHER_REGION, Axes, WindowGroup, window_groups
from vat.network import PairNetwork

NEVER = -1e9  # added to the scores of padding; infinity times zero would be no number


def portable(model: PairNetwork, *images: Tensor) -> PairNetwork:
    """A copy of `model` for export at the sizes of `images`, a call's inputs; the model itself is not changed."""
    twin = copy.deepcopy(model).eval().cpu().float().requires_grad_(False).set_backend("reference")
    if isinstance(twin.backbone, Backbone):
        twin.backbone = twin.backbone.folded()
    grids = _token_grids(twin, images)
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if isinstance(child, WindowAttention):
                setattr(parent, name, PortableWindowAttention(child, grids[child]))
            elif isinstance(child, VCM):
                setattr(parent, name, PortableVCM(child))
    return twin


@torch.no_grad()
def _token_grids(model: PairNetwork, images: Sequence[Tensor]) -> dict[nn.Module, Axes]:
    """On which grid every window attention works; the indices of its windows depend on it."""
    grids: dict[nn.Module, Axes] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        grids[module] = cast(Axes, tuple(inputs[0].shape[1:5]))

    attentions = [module for module in model.modules() if isinstance(module, WindowAttention)]
    hooks = [module.register_forward_pre_hook(note) for module in attentions]
    model(*images)
    for hook in hooks:
        hook.remove()
    return grids


class _Head(nn.Module):
    """One head of an attention, with weights of its own; queries are scaled by their weights."""

    def __init__(self, attention: WindowAttention, head: int) -> None:
        super().__init__()
        width = attention.proj.in_features
        depth = width // attention.heads
        weight = attention.qkv.weight.view(3, attention.heads, depth, width)[:, head]
        bias = attention.qkv.bias.view(3, attention.heads, depth)[:, head]
        self.query, self.key, self.value = (nn.Linear(width, depth) for _ in range(3))
        for linear, w, b, scale in zip(self.children(), weight, bias, (depth**-0.5, 1, 1), strict=True):
            linear.weight, linear.bias = (nn.Parameter(t * scale, requires_grad=False) for t in (w, b))
        self.register_buffer("pair_bias", attention.bias()[head])  # N, N

    def forward(self, windows: Tensor, marks: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, windows, N, C] -> [B, windows, N, d]; `marks` as of :func:`_marks`, with a batch."""
        q, k = self.query(windows), self.key(windows)
        if marks is not None:
            q, k = torch.cat([q, marks[0]], dim=-1), torch.cat([k, marks[1]], dim=-1)
        scores = q @ k.transpose(-1, -2) + self.pair_bias
        return scores.softmax(-1) @ self.value(windows)


class PortableWindowAttention(nn.Module):
    """`WindowAttention` on one grid: gather, products, gather."""

    tokens: Tensor
    places: Tensor
    query_marks: Tensor
    key_marks: Tensor

    def __init__(self, attention: WindowAttention, grid: Axes) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_Head(attention, head) for head in range(attention.heads))
        self.proj = attention.proj
        shift = tuple(s if n > w else 0 for s, n, w in zip(attention.shift, grid, attention.window, strict=True))
        self._place(window_groups(grid, attention.window, cast(Axes, shift)))

    def _place(self, groups: tuple[WindowGroup, ...]) -> None:
        """Which token stands where in the windows, and back."""
        tokens = torch.cat([group.tokens for group in groups])
        real = torch.cat([group.real.expand_as(group.tokens) for group in groups])
        places = torch.empty(int(real.sum()), dtype=torch.long)
        places[tokens[real]] = real.flatten().nonzero().flatten()
        self.windows = tuple(tokens.shape)
        self.masked = any(bool(group.mask.any()) for group in groups)
        self.register_buffer("tokens", tokens.flatten().int())
        self.register_buffer("places", places.int())
        query_marks, key_marks = _marks(groups)
        self.register_buffer("query_marks", query_marks)
        self.register_buffer("key_marks", key_marks)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H1, H2, H3, H4, C] -> the same shape."""
        windows = x.flatten(1, 4).index_select(1, self.tokens).unflatten(1, self.windows)  # B, windows, N, C
        marks = None
        if self.masked:
            marks = tuple(mark.expand(x.shape[0], -1, -1, -1) for mark in (self.query_marks, self.key_marks))
        mixed = torch.cat([head(windows, marks) for head in self.heads], dim=-1)
        return self.proj(mixed.flatten(1, 2).index_select(1, self.places)).view(x.shape)


def _marks(groups: tuple[WindowGroup, ...]) -> tuple[Tensor, Tensor]:
    """Factors [windows, N, R] whose product over R is the mask [windows, N, N], for R regions in a window.

    A token's query mark is 1 at its own region, its key mark the penalty at all others: R numbers for each token
    instead of N.
    """
    regions = torch.cat([_regions(group).expand_as(group.tokens) for group in groups])
    one_hot = F.one_hot(regions.clamp(min=0)).float()
    penalty = (OTHER_REGION * (1 - one_hot)).masked_fill(regions.unsqueeze(-1) < 0, NEVER)
    return one_hot, penalty


def _regions(group: WindowGroup) -> Tensor:
    """The number of each token's region [N] within its window, -1 for padding."""
    first_of_region = (group.mask == 0).float().argmax(1)  # tokens of one region see the same tokens
    regions = torch.full_like(first_of_region, -1)
    regions[group.real] = first_of_region[group.real].unique(return_inverse=True)[1]
    return regions


class PortableVCM(nn.Module):
    """`VCM` on volumes [B, Nq, C, Hs, Ws], one image over the support for every query position."""

    def __init__(self, vcm: VCM) -> None:
        super().__init__()
        self.units = nn.ModuleList(PortableConv4d(cast(Conv4d, unit)) for unit in vcm.units)

    def forward(self, query: Tensor, support: Tensor) -> Tensor:
        """Unit vectors [B, L, Hq, Wq, C] and [B, L, Hs, Ws, C] -> tokens [B, Hq', Wq', Hs', Ws', D]."""
        query_grid, support_grid = query.shape[2:4], support.shape[2:4]
        cost = (query.flatten(2, 3) @ support.flatten(2, 3).transpose(-1, -2)).relu()  # B, L, Nq, Ns
        volume = cost.transpose(1, 2).unflatten(-1, support_grid)
        for unit in self.units:
            volume, query_grid = unit(volume, query_grid)
        return volume.unflatten(1, query_grid).permute(0, 1, 2, 4, 5, 3)


class PortableConv4d(nn.Module):
    """`Conv4d` of the VCM; only the input and output of its query convolution are transposed."""

    def __init__(self, unit: Conv4d) -> None:
        super().__init__()
        self.query_stride, self.support_stride = unit.query_stride, unit.support_stride
        self.query_conv, self.support_conv, self.norm = unit.query_conv, unit.support_conv, unit.norm

    def forward(self, volume: Tensor, grid: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """[B, Nq, C, Hs, Ws] on a query grid -> [B, Nq', C', Hs', Ws'] and the new query grid."""
        batch, input_grid = volume.shape[0], grid
        pooled = _pool_support(volume.flatten(0, 1), self.support_stride)  # B * Nq, C, Hs', Ws'
        support_grid = pooled.shape[-2:]
        pooled = _turn(pooled.flatten(2).unflatten(0, (batch, -1)))  # B, Ns', C, Nq
        over_query = self.query_conv(pooled.flatten(0, 1).unflatten(-1, grid))
        grid = (over_query.shape[-2], over_query.shape[-1])
        over_query = _turn(over_query.flatten(2).unflatten(0, (batch, -1)))  # B, Nq', C', Ns'

        pooled = _pool_query(volume, input_grid, self.query_stride)  # B, Nq', C, Hs, Ws
        over_support = self.support_conv(pooled.flatten(0, 1)).flatten(2).unflatten(0, (batch, -1))
        return self._normalise(over_query + over_support).relu().unflatten(-1, support_grid), grid

    def _normalise(self, volume: Tensor) -> Tensor:
        """GroupNorm of [B, N, C, M] by the statistics of its groups and one scale and shift for each channel."""
        grouped = volume.unflatten(2, (self.norm.num_groups, -1)).flatten(3)  # B, N, G, C / G * M
        mean = grouped.mean(-1).mean(1)
        centred = grouped - mean[:, None, :, None]
        scale = ((centred * centred).mean(-1).mean(1) + self.norm.eps).rsqrt()  # B, G
        weight = (scale[:, :, None] * self.norm.weight.unflatten(0, (self.norm.num_groups, -1))).flatten(1)
        return centred.view(volume.shape) * weight[:, None, :, None] + self.norm.bias[:, None]


def _turn(x: Tensor) -> Tensor:
    """[B, N, C, M] -> [B, M, C, N] by a transpose of matrices and one of rows, 8 times faster than by one of both."""
    _, _, channels, columns = x.shape
    return x.flatten(2).transpose(1, 2).unflatten(1, (channels, columns)).transpose(1, 2)


def _pool_support(maps: Tensor, stride: int) -> Tensor:
    """Max over windows of the last two axes of [B, C, Hs, Ws], the last window clipped at the border."""
    return maps if stride == 1 else F.max_pool2d(maps, stride, ceil_mode=True)


def _pool_query(volume: Tensor, grid: tuple[int, int], stride: int) -> Tensor:
    """The same over the query positions of [B, Nq, C, Hs, Ws]; zeros fill the last window, as nothing is negative."""
    if stride == 1:
        return volume
    height, width = grid
    rows = F.pad(volume.flatten(2).unflatten(1, grid), (0, 0, 0, -width % stride, 0, -height % stride))
    rows = rows.unflatten(2, (-1, stride)).amax(3).unflatten(1, (-1, stride)).amax(2)
    return rows.flatten(1, 2).unflatten(-1, volume.shape[2:])
