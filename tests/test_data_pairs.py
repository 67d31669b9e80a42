"""Correspondence: layouts, key points, thresholds and flow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import data_fakes as fakes
from vat.data import PairDataset, build, collate, keypoint_flow, open_source, transfer_points
from vat.errors import VatError

GOLDEN = Path(__file__).parent / "golden" / "keypoints.npz"
SIZE = 128


def pairs(*args: Any, **options: Any) -> PairDataset:
    dataset = build(*args, image_size=SIZE, **options)
    assert isinstance(dataset, PairDataset)
    return dataset


def scaled(points: list[list[float]]) -> torch.Tensor:
    return torch.tensor(points) * torch.tensor([SIZE / 80, SIZE / 60])


def golden(name: str) -> torch.Tensor:
    return torch.from_numpy(np.load(GOLDEN)[name])


def test_flow_from_key_points_equals_the_published_one() -> None:
    target, source = golden("target_kps").mT, golden("source_kps").mT
    flow, valid = keypoint_flow(target, source, golden("kps_count"))
    torch.testing.assert_close(flow, golden("keypoint_flow"), atol=1e-5, rtol=0)
    assert torch.equal(valid, (golden("keypoint_flow") != 0).any(dim=1))


def test_moving_points_equals_the_published_one() -> None:
    moved = transfer_points(golden("flow"), golden("target_kps").mT)
    torch.testing.assert_close(moved, golden("moved_kps").mT, atol=1e-5, rtol=0)


def slow_flow(target: torch.Tensor, source: torch.Tensor, size: int, grid: int) -> torch.Tensor:
    """The rule cell by cell, as written down."""
    cell = size / grid
    flow = torch.zeros(2, grid, grid)
    for row in range(grid):
        for column in range(grid):
            low = torch.tensor([column, row]) * cell + cell / 2 - cell - 1
            high = torch.tensor([column, row]) * cell + cell / 2 + cell + 1
            covered = [i for i, p in enumerate(target) if (p >= low).all() and (p <= high).all()]
            if covered:
                flow[:, row, column] = (source[covered[-1]] - target[covered].mean(0)) / cell
    return flow


@pytest.mark.parametrize(("size", "grid"), [(512, 32), (256, 16), (128, 32)])
def test_flow_follows_the_rule_at_other_sizes(size: int, grid: int) -> None:
    torch.manual_seed(0)
    target, source = torch.rand(2, 1, 9, 2) * size
    flow, valid = keypoint_flow(target, source, torch.tensor([7]), size, grid)
    expected = slow_flow(target[0, :7], source[0, :7], size, grid)
    torch.testing.assert_close(flow[0], expected, atol=1e-4, rtol=0)
    assert not flow[0][:, ~valid[0]].any()


def test_constant_flow_moves_points_by_whole_cells() -> None:
    flow = torch.tensor([2.0, -1.0]).view(1, 2, 1, 1).expand(1, 2, 8, 8)
    points = torch.tensor([[[10.7, 20.2], [-5.0, 200.0], [-1.0, -1.0]]])
    moved = transfer_points(flow, points, size=64)
    expected = [[10 + 16, 20 - 8], [0 + 16, 63 - 8], [-1, -1]]
    assert moved[0].tolist() == [[float(x), float(y)] for x, y in expected]


def test_spair(tmp_path: Path) -> None:
    dataset = pairs("spair", fakes.spair(tmp_path), split="test")
    assert len(dataset) == 3
    sample = dataset[1]
    assert (sample["source_name"], sample["target_name"]) == ("im1.jpg", "im2.jpg")
    assert sample["target"].shape == (3, SIZE, SIZE)
    assert sample["target"].dtype == torch.uint8
    assert sample["n_points"] == 3
    torch.testing.assert_close(sample["target_kps"][:3], scaled(fakes.TARGET_POINTS))
    torch.testing.assert_close(sample["source_kps"][:3], scaled(fakes.SOURCE_POINTS))
    assert (sample["target_kps"][3:] == -1).all()
    assert sample["target_kps"].shape == (40, 2)
    assert sample["pck_threshold"] == pytest.approx(max(60 * SIZE / 80, 30 * SIZE / 60))  # the source's box
    levels = {key: int(value) for key, value in sample["levels"].items()}
    assert levels == {"viewpoint": 1, "scale": 2, "truncation": 0, "occlusion": 3}
    assert sample["flow"].shape == (2, 32, 32)
    assert sample["valid"].any()
    batch = collate([dataset[0], sample])
    assert batch["levels"]["occlusion"].tolist() == [3, 3]
    assert batch["category"] == ["cat", "cat"]


def test_pfpascal_leaves_hidden_points_out_and_flips_what_the_list_says(tmp_path: Path) -> None:
    root = fakes.pfpascal(tmp_path)
    sample = pairs("pfpascal", root, split="test")[0]
    assert sample["category"] == "bicycle"
    assert sample["n_points"] == 3
    assert sample["pck_threshold"] == SIZE
    assert (sample["source_name"], sample["target_name"]) == ("two.jpg", "one.jpg")
    torch.testing.assert_close(sample["target_kps"][:3], scaled(fakes.TARGET_POINTS))
    assert {int(value) for value in sample["levels"].values()} == {-1}

    train = pairs("pfpascal", root, split="train")
    straight, mirrored = (
        next(s for i in range(50) if torch.equal((s := train[i])["target"], image))
        for image in (sample["target"], sample["target"].flip(-1))
    )
    assert torch.equal(mirrored["source"], straight["source"].flip(-1))
    for side in ("target", "source"):
        torch.testing.assert_close(
            mirrored[f"{side}_kps"][:3, 0], SIZE - 1 - straight[f"{side}_kps"][:3, 0], atol=1e-3, rtol=0
        )
        torch.testing.assert_close(mirrored[f"{side}_kps"][:3, 1], straight[f"{side}_kps"][:3, 1])


def test_pfpascal_tables_with_key_points_of_their_own(tmp_path: Path) -> None:
    root = fakes.pfpascal(tmp_path)
    row = "PF-dataset-PASCAL/JPEGImages/two.jpg, PF-dataset-PASCAL/JPEGImages/one.jpg, 2, 10;20, 10;20, 1;2, 1;2"
    fakes.write(root / "test_pairs.csv", f"source_image,target_image,class,XA,YA,XB,YB\n{row}")
    sample = pairs("pfpascal", root, split="test")[0]
    assert sample["n_points"] == 3
    for end, sentence in (("2,yes", "has 'yes' for its flip"), ("cat", "has class 'cat'")):
        fakes.write(root / "trn_pairs.csv", f"source_image,target_image,class,flip\ntwo.jpg,one.jpg,{end}")
        with pytest.raises(VatError, match=sentence):
            pairs("pfpascal", root, split="train")[0]


def test_pfwillow(tmp_path: Path) -> None:
    sample = pairs("pfwillow", fakes.pfwillow(tmp_path), split="test")[0]
    assert sample["n_points"] == 10
    assert sample["category"] == "car(S)"
    torch.testing.assert_close(sample["source_kps"][:2], scaled([[10, 20], [11, 22]]))
    torch.testing.assert_close(sample["target_kps"][9:10], scaled([[49, 45]]))
    assert sample["pck_threshold"] == pytest.approx(18 * SIZE / 60)  # the box around the source points
    with pytest.raises(VatError, match="has no split 'train'"):
        build("pfwillow", tmp_path, split="train")


@pytest.mark.parametrize("make", [fakes.caltech, fakes.fss, fakes.folder])
def test_caltech_pairs_have_masks_of_one_class(tmp_path: Path, make: Any) -> None:
    dataset = pairs("caltech", make(tmp_path) if make is fakes.caltech else make(tmp_path, "ab"), split="test")
    assert len(dataset) == 15 * len(dataset.classes)
    expected = torch.from_numpy(fakes.box_mask(1)).float()[None, None]
    expected = torch.nn.functional.interpolate(expected, (SIZE, SIZE), mode="nearest")[0, 0]
    sample = dataset[0]
    for side in ("target", "source"):
        assert torch.equal(sample[f"{side}_mask"].float(), expected)
    assert sample["n_points"] == 0
    assert not sample["valid"].any()
    drawn, again = (
        [(pair.target_path, pair.source_path) for i in range(len(dataset)) for pair in [source.pair(i)]]
        for source in (dataset.source, pairs("caltech", tmp_path, split="test").source)
    )
    assert drawn == again
    assert all(target != source and target.parent == source.parent for target, source in drawn)


def test_training_flips_both_images_or_neither(tmp_path: Path) -> None:
    dataset = pairs("spair", fakes.spair(tmp_path, pairs=1), split="train", augment="strong")
    signs = set()
    for i in range(30):
        sample = dataset[i]
        for side, points in (("target", fakes.TARGET_POINTS), ("source", fakes.SOURCE_POINTS)):
            assert (sample[f"{side}_kps"][: sample["n_points"]] >= 0).all(), side
            assert (sample[f"{side}_kps"] < SIZE).all()
            assert points[0][0] < points[1][0]  # the second point lies right of the first, unless mirrored
        if sample["n_points"] == 3:
            right = [bool(sample[f"{s}_kps"][1, 0] > sample[f"{s}_kps"][0, 0]) for s in ("target", "source")]
            assert right[0] == right[1]
            signs.add(right[0])
    assert signs == {True, False}


def test_pairs_depend_on_seed_and_index_alone(tmp_path: Path) -> None:
    root = fakes.spair(tmp_path)
    options = {"split": "train", "augment": "cats+pfenet", "episodes": 5}
    alone = [pairs("spair", root, **options)[i] for i in range(5)]
    for workers, cache in ((2, "none"), (0, "memory")):
        loader = DataLoader(pairs("spair", root, cache=cache, **options), 2, num_workers=workers, collate_fn=collate)
        for key in ("target", "source", "source_kps", "flow"):
            seen = torch.cat([batch[key] for batch in loader])
            assert torch.equal(seen, torch.stack([sample[key] for sample in alone])), key
    assert pairs("spair", root, **options)[10**9]["index"] == 10**9


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"src_kps": [[500.0, 5.0], [1.0, 1.0], [2.0, 2.0]]},
            r"key point \(500, 5\) lies outside .*im0\.jpg",
        ),
        ({"src_kps": [[1.0, 1.0]]}, "has 3 and 1 key points"),
        ({"src_kps": 3}, "rows of x and y"),
        ({"src_kps": [[None, 5.0], [1.0, 1.0], [2.0, 2.0]]}, r"key point \(nan, 5\) lies outside"),
        ({"src_bndbox": [70, 35, 10, 5]}, "src_bndbox is empty"),
        ({"truncation": None}, r"\.json' is not .*truncation is None"),
        ({"occlusion": 7}, "occlusion is 7"),
        ({"category": "dog"}, "not an SPair-71k annotation"),
        ({"src_imname": "absent.jpg"}, r"no file .*absent\.jpg"),
    ],
)
def test_bad_pairs_get_a_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    dataset = pairs("spair", fakes.spair(tmp_path, **changes), split="test")
    with pytest.raises(VatError, match=sentence):
        dataset[0]


def test_bad_tables_and_annotations_get_a_sentence(tmp_path: Path) -> None:
    root = fakes.pfpascal(tmp_path)
    (root / "Annotations/bicycle/one.mat").write_bytes(b"nonsense")
    with pytest.raises(VatError, match=r"one\.mat' is damaged"):
        pairs("pfpascal", root, split="test")[0]
    (root / "Annotations/bicycle/one.mat").unlink()
    with pytest.raises(VatError, match=r"no annotation .*one\.mat"):
        pairs("pfpascal", root, split="test")[0]
    fakes.write(root / "test_pairs.csv", "source,target,class\na.jpg,b.jpg")
    with pytest.raises(VatError, match="a row with 2 instead of 3 columns"):
        pairs("pfpascal", root, split="test")
    (root / "val_pairs.csv").unlink()
    with pytest.raises(VatError, match=r"no list .*val_pairs\.csv"):
        pairs("pfpascal", root, split="val")


def test_hidden_files_are_no_photos(tmp_path: Path) -> None:
    root = fakes.fss(tmp_path)
    before = open_source("warped", root, split="train").image_paths()
    for place in (root, root / "a"):
        fakes.write(place / "._1.jpg", "x")
    assert open_source("warped", root, split="train").image_paths() == before
