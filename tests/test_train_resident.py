"""Images that stay on the device: the episodes of the loaders, with augmentation of the same distribution."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

import data_fakes as fakes
from vat.config import to_dict
from vat.data import EpisodeDataset, MixedDataset, build, collate
from vat.data.synthetic import SyntheticEpisodes
from vat.data.transforms import Augmentation
from vat.errors import VatError
from vat.images import to_tensor
from vat.launch import make_fabric
from vat.tensorfile import read_pickle
from vat.training import load_experiment, train
from vat.training import resident as resident_module
from vat.training.feed import Share
from vat.training.jitter import crop_image, crop_labels, draw, first_that_keeps, recolour, strong
from vat.training.resident import ResidentFeed, merge
from vat.training.state import differences

CONFIGS = Path(__file__).parent.parent / "configs"
CPU = torch.device("cpu")


def smooth(seed: int, size: int) -> torch.Tensor:
    """A picture without hard edges, uint8 [3, S, S], so that rounding of positions cannot hide in noise."""
    small = tv_tensors.Image(to_tensor(fakes.photo(seed, (6, 6))))
    return F.resize(small, [size, size], antialias=True).as_subclass(torch.Tensor)


def planes_of(count: int, size: int, box: tuple[slice, slice]) -> torch.Tensor:
    labels = torch.zeros(size, size, dtype=torch.uint8)
    labels[box] = 1
    labels[:2] = 255
    return torch.stack([torch.cat([smooth(i, size), labels[None]]) for i in range(count)])


def test_strong_augmentation_on_the_device_is_torchvisions() -> None:
    """Step by step: a level of difference in the crop may grow with the contrast."""
    planes = planes_of(24, 61, (slice(20, 45), slice(10, 40)))
    draws = draw(range(24), 61)
    boxes = first_that_keeps(planes[:, 3] == 1, draws.boxes)
    assert len({tuple(box) for box in boxes.tolist()}) > 20
    assert 0 < int(draws.flip.sum()) < 24
    crops, labels = crop_image(planes[:, :3], boxes, draws.flip), crop_labels(planes[:, 3], boxes, draws.flip)
    recoloured = recolour(crops, draws.factors, draws.order)
    for i in range(24):
        both = tv_tensors.Image(planes[i, :3]), tv_tensors.Mask(planes[i, 3:])
        image, mask = (F.resized_crop(t, *boxes[i].tolist(), [61, 61], antialias=True) for t in both)
        if draws.flip[i]:
            image, mask = F.horizontal_flip(image), F.horizontal_flip(mask)
        assert (crops[i] - image.as_subclass(torch.Tensor)).abs().max() <= 1
        assert torch.equal(labels[i], mask.as_subclass(torch.Tensor)[0])
        picture = crops[i].to(torch.uint8)
        for kind in draws.order[i].tolist():
            change = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)[kind]
            picture = change(picture, float(draws.factors[i, kind]))
        assert (recoloured[i] - picture).abs().max() <= 2
    assert torch.equal(strong(planes, draws), torch.cat([recoloured.to(torch.uint8), labels[:, None]], 1))


def test_crops_keep_half_of_the_foreground_and_vary_like_those_of_the_loaders() -> None:
    size, count, box = 64, 400, (slice(4, 20), slice(40, 60))
    planes = planes_of(1, size, box).expand(count, -1, -1, -1)
    draws = draw(range(count), size)
    boxes = first_that_keeps(planes[:, 3] == 1, draws.boxes)
    inside = [float((planes[0, 3, t : t + h, x : x + w] == 1).sum()) for t, x, h, w in boxes.tolist()]
    assert min(inside) >= 0.5 * 16 * 20
    assert (boxes[:, 0] + boxes[:, 2]).max() <= size
    assert (boxes[:, 1] + boxes[:, 3]).max() <= size

    crop: Any = Augmentation("strong", size)._steps.transforms[0]  # type: ignore[union-attr]
    torch.manual_seed(0)
    params = [crop.make_params([tv_tensors.Mask(planes[0, 3:])]) for _ in range(count)]
    theirs = torch.tensor([[p["top"], p["left"], p["height"], p["width"]] for p in params]).float()
    error = 4 * theirs.std(0) * (2 / count) ** 0.5
    assert ((boxes.float().mean(0) - theirs.mean(0)).abs() < error).all()
    assert ((boxes.float().std(0) - theirs.std(0)).abs() < error).all()
    assert 0.42 < float(draws.flip.float().mean()) < 0.58
    assert draws.factors.min() >= 0.6
    assert draws.factors.max() <= 1.4
    assert abs(float(draws.factors.mean()) - 1) < 0.03
    assert sorted(torch.unique(draws.order, dim=0, return_counts=True)[1].tolist())[0] > count / 6 * 0.6


def test_an_image_is_augmented_by_its_own_seed_alone() -> None:
    planes = planes_of(3, 40, (slice(10, 30), slice(10, 30)))
    together = strong(planes, draw([5, 2**62, 9], 40))
    alone = strong(planes[1:2], draw([2**62], 40))
    assert torch.equal(together[1:2], alone)
    empty = planes.clone()
    empty[:, 3] = 0
    assert not strong(empty, draw([1, 2, 3], 40))[:, 3].any()


def fss(tmp_path: Path, **options: Any) -> EpisodeDataset:
    root = tmp_path / "fss"
    if not root.exists():
        fakes.fss(root)
    dataset = build("fss", root, split="train", image_size=40, **options)
    assert isinstance(dataset, EpisodeDataset)
    return dataset


@pytest.mark.parametrize("workers", [0, 2])
def test_the_device_shows_the_episodes_that_the_loaders_show(tmp_path: Path, workers: int) -> None:
    dataset = fss(tmp_path, shots=2)
    share = Share(6, accumulate=2)
    batches = ResidentFeed(dataset, CPU, workers).batches(share, first_step=3)
    for numbers in [*share.episodes(3), *share.episodes(4)]:
        batch, expected = next(batches), collate([dataset[number] for number in numbers])
        assert batch.keys() == expected.keys()
        for key, value in expected.items():
            same = torch.equal(batch[key], value) if isinstance(value, torch.Tensor) else batch[key] == value
            assert same, key


def test_what_is_read_on_the_host_stays_there() -> None:
    elsewhere = torch.device("meta")
    here = {"query": torch.zeros(2, 3, device=elsewhere), "absent": torch.tensor([True, False]), "name": ["a", "c"]}
    loaded = {"query": torch.zeros(1, 3), "absent": torch.tensor([True]), "name": ["b"], "index": torch.tensor([1])}
    merged = merge(here | {"index": torch.tensor([0, 2])}, loaded, [0, 2], elsewhere)
    assert merged["name"] == ["a", "b", "c"]
    assert merged["index"].tolist() == [0, 1, 2]
    assert merged["absent"].tolist() == [True, True, False]
    assert (merged["query"].shape, merged["query"].device) == ((3, 3), elsewhere)


def test_pascals_void_arrives_and_strong_changes_the_pictures_alone(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path, per_class=2)
    plain, moving = (
        build("pascal", root, split="train", splits=tmp_path / "splits", image_size=40, augment=name)
        for name in ("none", "strong")
    )
    first, second = (ResidentFeed(d, CPU, 0).batch([3, 8]) for d in (plain, moving))
    assert first["ignore"].any()
    assert first["query_name"] == second["query_name"]
    assert not torch.equal(first["query"], second["query"])
    assert second["query_mask"].any()
    again = ResidentFeed(moving, CPU, 0).batch([8])  # whatever it is computed together with
    assert torch.equal(again["query"][0], second["query"][1])
    assert torch.equal(again["support"][0], second["support"][1])


def test_parts_that_are_drawn_come_from_loaders_and_stand_at_their_places(tmp_path: Path) -> None:
    parts = [(SyntheticEpisodes(image_size=40), 1.0), (fss(tmp_path), 1.0), (fss(tmp_path, seed=1), 0.5)]
    mixed = MixedDataset(parts, seed=0)
    share = Share(4)
    batches = ResidentFeed(mixed, CPU, 0).batches(share, first_step=0)
    seen = set()
    for step in range(8):
        batch = next(batches)
        seen.update(mixed.part_of(number) for number in range(4 * step, 4 * step + 4))
        expected = collate([mixed[number] for number in range(4 * step, 4 * step + 4)])
        for key in ("query", "support_mask", "index", "query_size", "query_name", "class_id"):
            value = expected[key]
            same = torch.equal(batch[key], value) if isinstance(value, torch.Tensor) else batch[key] == value
            assert same, (step, key)
    batches.close()  # type: ignore[attr-defined]
    assert seen == {0, 1, 2}


def test_what_cannot_be_kept_on_the_device_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VatError, match="episodes from files"):
        ResidentFeed(SyntheticEpisodes(image_size=40), CPU, 0)
    with pytest.raises(VatError, match=r"'cats'; use data.cache: memory"):
        ResidentFeed(fss(tmp_path, augment="cats"), CPU, 0)
    monkeypatch.setattr(resident_module, "free_memory", lambda device: 1000)
    with pytest.raises(VatError, match=r"GiB for 16 images of 40 px.*use data.cache: memory"):
        ResidentFeed(fss(tmp_path), CPU, 0)


def short(root: Path, *changes: str) -> Any:
    return load_experiment(
        CONFIGS / "synthetic_tiny.yaml",
        [
            "data.name=fss",
            f"data.root={root}",
            "data.image_size=48",
            "training.steps=4",
            "training.batch_size=2",
            "training.workers=0",
            "validation.episodes=2",
            "validation.every=2",
            "validation.at_start=false",
            *changes,
        ],
    )


def test_a_run_from_the_device_is_the_run_from_the_loaders_and_resumes_exactly(tmp_path: Path) -> None:
    root = fakes.fss(tmp_path / "fss")
    torch.set_num_threads(1)
    runs = {}
    for name, changes in {
        "loaders": (),
        "device": ("data.cache=device",),
        "strong": ("data.cache=device", "data.augment=strong"),
    }.items():
        train(short(root, *changes), tmp_path / name, make_fabric("cpu"))
        runs[name] = read_pickle(tmp_path / name / "last.ckpt")["model"]
    assert all(torch.equal(value, runs["device"][key]) for key, value in runs["loaders"].items())
    assert any(not torch.equal(value, runs["strong"][key]) for key, value in runs["loaders"].items())

    changes = ("data.cache=device", "data.augment=strong")
    train(short(root, *changes, "training.schedule=constant"), tmp_path / "whole", make_fabric("cpu"))
    train(short(root, *changes, "training.schedule=constant", "training.steps=2"), tmp_path / "cut", make_fabric("cpu"))
    train(short(root, *changes, "training.schedule=constant"), tmp_path / "cut", make_fabric("cpu"), resume=True)
    whole, cut = (read_pickle(tmp_path / name / "last.ckpt")["model"] for name in ("whole", "cut"))
    assert all(torch.equal(value, cut[key]) for key, value in whole.items())


def test_resuming_may_move_the_cache_only_where_that_changes_nothing(tmp_path: Path) -> None:
    def changed(*changes: str) -> list[str]:
        before, now = (to_dict(short(tmp_path, f"data.cache={c}", *changes)) for c in ("memory", "device"))
        return differences(before, now)

    assert changed() == []
    assert changed("data.augment=strong") == ["data.cache"]
    older = to_dict(short(tmp_path))
    del older["data"]["cache"]  # a run from before there was such a setting
    assert differences(older, to_dict(short(tmp_path))) == []


def test_drawing_uses_only_boxes_that_fit() -> None:
    boxes = draw(range(50), 33).boxes.numpy()
    assert np.all(boxes[..., 0] >= 0)
    assert np.all(boxes[..., :2] + boxes[..., 2:] <= 33)
    assert np.all(boxes[..., 2:] > 0)
