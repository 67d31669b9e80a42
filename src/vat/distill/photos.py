"""Photos without labels, decoded once into the device's memory, and random views of them drawn there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors

from vat.data.transforms import resize
from vat.data.workers import batches_of, lost_workers_explained
from vat.errors import VatError
from vat.images import IMAGE_SUFFIXES, read_image, to_tensor

MASK_FOLDERS = ("SegmentationClass", "SegmentationClassAug", "SegmentationObject", "masks", "Annotations")


def find_photos(folders: Iterable[str | Path]) -> list[Path]:
    """Every picture below the folders; masks, in folders of their usual names or as .png beside a .jpg, are not."""
    photos: list[Path] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise VatError(f"There is no folder of photos {folder}.")
        found = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in IMAGE_SUFFIXES]
        stems = {p.with_suffix("") for p in found if p.suffix.lower() != ".png"}
        photos += [
            p
            for p in found
            if not (set(p.relative_to(folder).parts[:-1]) & set(MASK_FOLDERS))
            and not (p.suffix.lower() == ".png" and p.with_suffix("") in stems)
        ]
    if not photos:
        raise VatError("No photo was found; name folders with `photos`.")
    return photos


class _Squares(Dataset[Tensor | None]):
    """Decoded photos as uint8 [3, S, S]; None for one that cannot be read."""

    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths, self.size = paths, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor | None:
        try:
            image = to_tensor(read_image(self.paths[index], at_least=self.size))
        except VatError:
            return None
        return resize(tv_tensors.Image(image), self.size).as_subclass(Tensor)


def load_photos(paths: list[Path], size: int, workers: int, device: torch.device) -> Tensor:
    """All photos as uint8 [N, 3, S, S] on the device; those that cannot be read are left out."""
    loader = DataLoader(_Squares(paths, size), batch_size=None, num_workers=workers)
    with lost_workers_explained("workers"):
        photos = track(batches_of(loader), "decoding photos", total=len(paths))
        kept = [p.to(device) for p in photos if p is not None]
    if not kept:
        raise VatError(f"None of the {len(paths)} photos can be read.")
    return torch.stack(kept)


def random_views(
    photos: Tensor, size: int, area: tuple[float, float], jitter: float, generator: torch.Generator
) -> Tensor:
    """One crop of each photo uint8 [B, 3, S, S], mirrored or not, of other colours: float [B, 3, size, size] in [0, 1].

    Everything is drawn per photo and computed for the whole batch at once.
    """
    count, device = len(photos), photos.device

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, device=device)

    side, ratio = uniform(*area).sqrt(), torch.exp(uniform(-1, 1) * math.log(4 / 3) / 2)
    width, height = (side * ratio).clamp(max=1), (side / ratio).clamp(max=1)
    x, y = uniform(-1, 1) * (1 - width), uniform(-1, 1) * (1 - height)
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(x)
    matrix = torch.stack([torch.stack([width * mirror, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
    grid = F.affine_grid(matrix, [count, 3, size, size], align_corners=False)
    views = F.grid_sample(photos.float() / 255, grid, padding_mode="reflection", align_corners=False)
    return recolour(views, *(uniform(1 - jitter, 1 + jitter) for _ in range(3)))


def recolour(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] with factors [B] of brightness, contrast and saturation."""
    brightness, contrast, saturation = (f.view(-1, 1, 1, 1) for f in (brightness, contrast, saturation))
    images = images * brightness
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    gray = (images * weights).sum(1, keepdim=True)
    images = gray + (images - gray) * saturation
    middle = gray.mean((-2, -1), keepdim=True)
    return (middle + (images - middle) * contrast).clamp(0, 1)
