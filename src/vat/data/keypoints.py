"""Key points and flow: how sparse points become a training target, and how a flow moves points.

Points are (x, y) in pixels of a square image of side `size`; a flow lives on a `grid` x `grid` raster in
units of its cells, channel 0 = x, and leads from the target image to the source image.
"""

import torch
import torch.nn.functional as F

MAX_POINTS = 40
"""Rows of a padded list of key points; the rows beyond the number of points are (-1, -1)."""


def pad_points(points: torch.Tensor) -> torch.Tensor:
    """[N, 2] -> [MAX_POINTS, 2], padded with -1."""
    return F.pad(points.float(), (0, 0, 0, MAX_POINTS - len(points)), value=-1.0)


def keypoint_flow(
    target_kps: torch.Tensor, source_kps: torch.Tensor, n: torch.Tensor, size: int = 512, grid: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ground-truth flow from matching key points.

    A cell reaches one pixel beyond its neighbours' centres on every side (for 512 px and 32 cells: cell i
    covers [16i - 9, 16i + 25]), so one point trains several cells. A cell gets the vector from the mean of
    the target points it covers to the source point of the last of them; cells without any are zero and not
    valid.

    Args:
        target_kps, source_kps: [B, N, 2]; rows from `n` on are padding.
        n: [B], the number of points of each pair.

    Returns:
        flow [B, 2, grid, grid] and valid [B, grid, grid].
    """
    cell = size / grid
    centres = (torch.arange(grid, device=target_kps.device) + 0.5) * cell
    near = (target_kps.unsqueeze(-1) - centres).abs() <= cell + 1  # B N 2 grid
    present = torch.arange(target_kps.shape[1], device=n.device) < n.unsqueeze(-1)  # B N
    covers = near[:, :, 1, :, None] & near[:, :, 0, None, :] & present[:, :, None, None]  # B N grid grid

    weights = covers.to(target_kps.dtype)
    valid = covers.any(dim=1)
    mean_target = torch.einsum("bnij,bnc->bcij", weights, target_kps) / weights.sum(1, keepdim=True).clamp(min=1)
    order = torch.arange(1, target_kps.shape[1] + 1, device=covers.device)[:, None, None]
    last = (covers * order).argmax(dim=1)  # B grid grid
    batch = torch.arange(len(last), device=last.device)[:, None, None]
    last_source = source_kps[batch, last].permute(0, 3, 1, 2)
    return (last_source - mean_target) / cell * valid.unsqueeze(1), valid


def transfer_points(flow: torch.Tensor, points: torch.Tensor, size: int = 512) -> torch.Tensor:
    """Move target points with a flow into the source image.

    The flow is read at the point rounded down and clamped into the image, and added to that rounded point.

    Args:
        flow: [B, 2, G, G] in cells of its grid.
        points: [B, N, 2] in pixels; padding rows (-1, -1) stay as they are.

    Returns:
        [B, N, 2] in pixels.
    """
    full = F.interpolate(flow, size=(size, size), mode="bilinear", align_corners=False) * (size / flow.shape[-1])
    pixel = points.floor().long().clamp(0, size - 1)  # B N 2
    batch = torch.arange(len(pixel), device=pixel.device)[:, None]
    moved = pixel + full.permute(0, 2, 3, 1)[batch, pixel[..., 1], pixel[..., 0]]
    return torch.where((points == -1).all(dim=-1, keepdim=True), points, moved)
