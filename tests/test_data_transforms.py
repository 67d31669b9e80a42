"""Augmentation moves image, labels and key points together."""

import pytest
import torch
from torchvision import tv_tensors

from vat.data.transforms import AUGMENTATIONS, Augmentation, resize

SIZE = 96


def scene() -> dict[str, torch.Tensor]:
    """A bright square on dark ground, its mask, and its four corners and centre."""
    image = torch.full((3, SIZE, SIZE), 20, dtype=torch.uint8)
    mask = torch.zeros(1, SIZE, SIZE, dtype=torch.uint8)
    image[:, 30:60, 40:80] = 240
    mask[:, 30:60, 40:80] = 1
    points = torch.tensor([[40.0, 30.0], [79.0, 30.0], [40.0, 59.0], [79.0, 59.0], [59.5, 44.5]])
    return {
        "image": tv_tensors.Image(image),
        "labels": tv_tensors.Mask(mask),
        "points": tv_tensors.KeyPoints(points, canvas_size=(SIZE, SIZE)),
    }


@pytest.mark.parametrize("name", ["pfenet", "strong"])
def test_image_mask_and_points_stay_together(name: str) -> None:
    augment = Augmentation(name, SIZE)
    moved = 0
    for seed in range(30):
        item = augment(scene(), seed)
        assert item["image"].shape == (3, SIZE, SIZE)
        bright = item["image"].float().mean(0) > 0.5 * float(item["image"].max())
        labels = item["labels"][0]
        known = labels != 255
        agreement = (bright == (labels == 1))[known].float().mean()
        assert agreement > 0.97, seed
        x, y = item["points"][4].round().long().tolist()  # the centre lies on the square
        if 2 <= x < SIZE - 2 and 2 <= y < SIZE - 2:
            assert labels[y, x] == 1, seed
        rows, columns = (labels == 1).nonzero(as_tuple=True)
        corners = item["points"][:4]
        inside = ((corners >= 3) & (corners <= SIZE - 4)).all(dim=1)
        for x, y in corners[inside].tolist():  # every corner lies at the edge of the mask
            assert ((rows - y).abs() + (columns - x).abs()).min() <= 4, seed
        moved += int(not torch.equal(labels, scene()["labels"][0]))
    assert moved > 20


def test_photometric_sets_leave_masks_and_points_alone() -> None:
    augment = Augmentation("cats", SIZE)
    changed = 0
    for seed in range(20):
        item = augment(scene(), seed)
        assert torch.equal(item["labels"], scene()["labels"])
        assert torch.equal(item["points"], scene()["points"])
        changed += int(not torch.equal(item["image"], scene()["image"]))
    assert 5 < changed <= 20


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_seed_decides_everything(name: str) -> None:
    augment = Augmentation(name, SIZE)
    state = torch.get_rng_state()
    first, again = augment(scene(), 5), augment(scene(), 5)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert torch.equal(torch.get_rng_state(), state)
    if name != "none":
        assert any(not torch.equal(augment(scene(), seed)["image"], first["image"]) for seed in range(6, 16))


def test_strong_crops_keep_half_of_the_foreground() -> None:
    augment = Augmentation("strong", SIZE)
    for seed in range(40):
        item = scene()
        kept = augment({"image": item["image"], "points": item["points"]}, seed)["points"]
        assert ((kept >= -1) & (kept <= SIZE)).all(dim=1).float().mean() >= 0.5


def test_a_forced_flip_mirrors_points_with_pixels() -> None:
    augment = Augmentation("strong", SIZE)
    for seed in range(5):
        straight, mirrored = augment(scene(), seed, flip=False), augment(scene(), seed, flip=True)
        assert torch.equal(mirrored["image"], straight["image"].flip(-1))
        assert torch.allclose(mirrored["points"][:, 0], SIZE - 1 - straight["points"][:, 0])
        assert torch.equal(mirrored["points"][:, 1], straight["points"][:, 1])


def test_resizing_scales_points_and_keeps_labels() -> None:
    small = resize(scene(), SIZE // 2)
    assert small["image"].shape == (3, SIZE // 2, SIZE // 2)
    assert small["labels"].unique().tolist() == [0, 1]
    assert torch.allclose(small["points"], scene()["points"] / 2)
