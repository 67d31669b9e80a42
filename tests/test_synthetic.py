"""The synthetic world: samples are pure functions of their index, and labels are exact."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from vat.data import build
from vat.data.synthetic import SPLIT_CLASSES, Scene, SyntheticEpisodes, SyntheticPairs, class_recipe
from vat.data.synthetic.body import Body, Joint, Part
from vat.data.synthetic.correspondence import (
    canonical_coordinates,
    dense_flow,
    keypoints,
    match,
    matching_keypoints,
    part_under,
)
from vat.data.synthetic.instance import Instance
from vat.data.synthetic.noise import fractal_noise, stream
from vat.data.synthetic.outline import diamond_index, polygon, superellipse
from vat.data.synthetic.paint import Canvas, Light, paint_instance
from vat.data.synthetic.recipe import Recipe
from vat.errors import VatError

SIZE = 96


def same(first: Any, second: Any) -> bool:
    """Equality of nested samples."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first == second


def pair_of_scenes(index: int, size: int = 192) -> tuple[Scene, Scene]:
    pairs = SyntheticPairs("val", image_size=size, seed=3)
    return pairs.scene(index, 0), pairs.scene(index, 1)


def test_episode_sample_is_complete() -> None:
    sample = SyntheticEpisodes("test", shots=2, image_size=SIZE)[5]
    expected = {
        "query": (torch.uint8, (3, SIZE, SIZE)),
        "query_mask": (torch.uint8, (SIZE, SIZE)),
        "ignore": (torch.bool, (SIZE, SIZE)),
        "support": (torch.uint8, (2, 3, SIZE, SIZE)),
        "support_mask": (torch.uint8, (2, SIZE, SIZE)),
        "class_id": (torch.int64, ()),
        "index": (torch.int64, ()),
        "absent": (torch.bool, ()),
        "query_size": (torch.int64, (2,)),
    }
    for key, (dtype, shape) in expected.items():
        assert (sample[key].dtype, tuple(sample[key].shape)) == (dtype, shape), key
    assert set(sample) - set(expected) == {"query_name", "support_names"}
    assert set(sample["query_mask"].unique().tolist()) == {0, 1}
    assert not sample["ignore"].any()


def test_pair_sample_is_complete() -> None:
    sample = SyntheticPairs("test", image_size=128, grid=16)[5]
    expected = {
        "target": (torch.uint8, (3, 128, 128)),
        "source": (torch.uint8, (3, 128, 128)),
        "target_kps": (torch.float32, (40, 2)),
        "source_kps": (torch.float32, (40, 2)),
        "n_points": (torch.int64, ()),
        "flow": (torch.float32, (2, 16, 16)),
        "valid": (torch.bool, (16, 16)),
        "pck_threshold": (torch.float32, ()),
        "class_id": (torch.int64, ()),
        "index": (torch.int64, ()),
    }
    for key, (dtype, shape) in expected.items():
        assert (sample[key].dtype, tuple(sample[key].shape)) == (dtype, shape), key
    count = int(sample["n_points"])
    for side in ("target_kps", "source_kps"):
        assert ((sample[side][:count] >= 0) & (sample[side][:count] < 128)).all()
        assert (sample[side][count:] == -1).all()
    assert all(int(level) == -1 for level in sample["levels"].values())


@pytest.mark.parametrize("kind", [SyntheticEpisodes, SyntheticPairs])
def test_samples_depend_on_seed_split_and_index_alone(kind: Any) -> None:
    data = kind("val", image_size=SIZE, seed=1)
    backwards = [data[index] for index in (7, 3)]
    assert same(kind("val", image_size=SIZE, seed=1)[3], backwards[1])
    assert not same(kind("val", image_size=SIZE, seed=2)[3], backwards[1])
    image = "query" if kind is SyntheticEpisodes else "target"
    assert not torch.equal(backwards[0][image], backwards[1][image])


def test_workers_do_not_change_samples() -> None:
    data = SyntheticEpisodes("train", image_size=SIZE, seed=4, episodes=4)
    alone = list(data)
    loaded = list(DataLoader(data, batch_size=None, num_workers=2))
    assert len(loaded) == 4
    assert all(same(first, second) for first, second in zip(alone, loaded, strict=True))


def test_any_index_is_an_episode() -> None:
    data = SyntheticEpisodes("train", image_size=SIZE, episodes=2)
    assert data[10**12]["query_mask"].any()
    assert len(list(data)) == len(data) == 2
    with pytest.raises(IndexError):
        data[-1]


def test_fewer_shots_are_a_prefix_of_more() -> None:
    one, five = (SyntheticEpisodes("test", shots=k, image_size=SIZE, seed=9)[11] for k in (1, 5))
    assert same(one["query"], five["query"])
    assert same(one["query_mask"], five["query_mask"])
    assert torch.equal(one["support"], five["support"][:1])
    assert torch.equal(one["support_mask"], five["support_mask"][:1])
    assert five["support_names"].startswith(one["support_names"] + "|")
    images = [five["query"], *five["support"]]
    assert not any(torch.equal(a, b) for k, a in enumerate(images) for b in images[:k])


def test_splits_share_no_class() -> None:
    ranges = sorted(SPLIT_CLASSES.values(), key=lambda ids: ids.start)
    assert all(low.stop <= high.start for low, high in itertools.pairwise(ranges))
    assert (len(SPLIT_CLASSES["test"]), len(SPLIT_CLASSES["val"])) == (200, 100)
    for split, ids in SPLIT_CLASSES.items():
        data = SyntheticEpisodes(split, image_size=SIZE)
        scenes = [data.scene(index, 0) for index in range(6)]
        shown = {instance.recipe.class_id for scene in scenes for instance in scene.instances}
        assert all(class_id in ids for class_id in shown - {-1})  # distractors, too; -1 are props
    looks = {class_recipe(k).coats["main"].base.tobytes() for k in (*range(300), *range(1000, 1100))}
    assert len(looks) == 400


def test_classes_come_equally_often_in_tests() -> None:
    data = SyntheticEpisodes("val", image_size=SIZE)
    drawn = [[data._class_id(index) for index in range(start, start + 100)] for start in (0, 100)]
    assert all(sorted(turn) == sorted(data.classes) for turn in drawn)
    assert drawn[0] != drawn[1]
    assert len(set(data.classes.values())) == 100


def test_chosen_classes_only() -> None:
    data = SyntheticEpisodes("train", image_size=SIZE, classes=[1234, 99_999])
    assert {int(data[index]["class_id"]) for index in range(8)} == set(data.classes) == {1234, 99_999}


def test_distractors_never_share_both_build_and_coats() -> None:
    data = SyntheticEpisodes("test", image_size=SIZE)
    alike = {"plan": 0, "coats": 0}
    for index in range(40):
        recipe = class_recipe(data._class_id(index))
        for other in data._others(recipe, stream(1, index)):
            plan, coats = other.body.plan == recipe.body.plan, other.coats is recipe.coats
            assert not (plan and coats)
            alike["plan"] += plan
            alike["coats"] += coats
    assert min(alike.values()) > 3


@pytest.mark.parametrize("split", ["train", "test"])
def test_masks_have_a_sane_size(split: str) -> None:
    data = SyntheticEpisodes(split, image_size=SIZE, seed=2)
    areas = [data.scene(index, 0).mask.mean() for index in range(40)]
    assert min(areas) > 0.01
    assert max(areas) < 0.6
    assert max(areas) > 3 * min(areas)


@pytest.mark.parametrize("index", range(4))
def test_matching_points_show_the_same_spot(index: int) -> None:
    target, source = pair_of_scenes(index)
    y, x = np.nonzero(target.owner == 0)
    points = np.stack([x, y], 1).astype(float)
    moved, valid = match(target, source, points)
    assert valid.mean() > 0.2
    part = part_under(target, points[valid])
    assert (part_under(source, moved[valid]) == part).all()
    spots = [
        canonical_coordinates(scene.instances[0], part, places)
        for scene, places in ((target, points[valid]), (source, moved[valid]))
    ]
    np.testing.assert_allclose(spots[0], spots[1], atol=1e-6)
    back, returned = match(source, target, moved[valid])
    np.testing.assert_allclose(back[returned], points[valid][returned], atol=1e-5)


@pytest.mark.parametrize("index", range(4))
def test_dense_flow_leads_to_the_matching_keypoints(index: int) -> None:
    target, source = pair_of_scenes(index)
    size = target.owner.shape[0]
    flow, valid = dense_flow(target, source, grid=size)
    in_target, in_source = matching_keypoints(target, source)
    column, row = np.rint(in_target).astype(int).T
    known = valid[row, column]
    assert known.sum() >= 4
    landed = np.stack([column, row], 1) + flow[:, row, column].T
    assert np.abs(landed - in_source)[known].max() < 1.5


def test_flow_is_in_cells_of_its_grid() -> None:
    target, source = pair_of_scenes(0)
    (coarse, valid), (fine, _) = (dense_flow(target, source, grid) for grid in (64, 192))
    # A coarse cell of 3 x 3 pixels has its centre on the middle one.
    np.testing.assert_allclose(coarse[:, valid], fine[:, 1::3, 1::3][:, valid] / 3, atol=1e-6)
    assert (coarse[:, ~valid] == 0).all()


def test_occluded_spots_on_request() -> None:
    target, source = pair_of_scenes(1)
    (_, seen), (_, present) = (dense_flow(target, source, 64, keep_occluded=keep) for keep in (False, True))
    assert (present | ~seen).all()
    assert present.sum() > seen.sum()


def test_visible_keypoints_lie_on_their_part() -> None:
    scene, _ = pair_of_scenes(2)
    found = keypoints(scene)
    assert len(found.names) == len(set(found.names)) == len(found.positions) == len(found.visible)
    assert found.visible.sum() >= 3
    column, row = np.rint(found.positions[found.visible]).astype(int).T
    assert (scene.mask[row, column] == 1).all()


def test_outline_gauge_is_the_norm_for_an_ellipse() -> None:
    u, v = stream(0).uniform(-2, 2, (2, 500)).astype(np.float32)
    column, length = diamond_index(u, v)
    np.testing.assert_allclose(length * superellipse(2.0).inverse_radius[column], np.hypot(u, v), rtol=5e-3)


@pytest.mark.parametrize("radius", [4.3, 25.0])
def test_painted_disc_has_the_right_area(radius: float) -> None:
    recipe = class_recipe(0)
    disc = Part("disc", superellipse(), (1.0, 1.0), Joint())
    instance = Instance(
        Recipe(-1, Body("disc", (disc,)), recipe.coats),
        np.array([[[radius, 0, 40.2], [0, radius, 39.7], [0, 0, 1.0]]]),
        np.ones(3, np.float32),
    )
    canvas = Canvas.on(np.full((3, 80, 80), -10.0, np.float32))
    paint_instance(canvas, instance, 0, Light(np.array([0, 0, 1], np.float32), 0.5))
    assert (canvas.owner == 0).sum() == pytest.approx(np.pi * radius**2, rel=0.03)
    assert (canvas.part[canvas.owner == 0] == 0).all()
    assert (canvas.rgb[:, canvas.owner < 0] < 0).all()  # outside, at most half of the background is covered


def test_noise_has_the_asked_shape_and_range() -> None:
    for shape in ((1, 97), (64, 33), (100, 100)):
        noise = fractal_noise(stream(1), shape, (1, 3))
        assert noise.shape == shape
        assert noise.dtype == np.float32
        assert 0.1 < noise.std() < 0.8


def test_outlines_touch_the_unit_square() -> None:
    shape = polygon(stream(3), 5)
    assert np.abs(shape.points).max() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "tests"}, "no split 'tests'"),
        ({"shots": 0}, "at least one support"),
        ({"image_size": 8}, "at least 32 pixels"),
        ({"seed": -1}, "must not be negative"),
        ({"split": "test", "classes": [500]}, "ids from 0 to 199"),
        ({"split": "test", "classes": []}, "ids from 0 to 199"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(VatError, match=message):
        SyntheticEpisodes(**arguments)


def test_pairs_by_name_have_the_grid_that_was_asked_for():
    sample = build("synthetic-pairs", split="test", image_size=64, grid=8)[0]
    assert sample["flow"].shape == (2, 8, 8)
    assert sample["valid"].shape == (8, 8)
