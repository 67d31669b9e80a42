"""Points and pixels carried from photo to photo: geometry, confidence, and what is written."""

import csv
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import vat
from small import small
from vat.data import transfer_points
from vat.errors import VatError
from vat.matcher import agreement, carry, dense_agreement, dense_positions, grid_points

NETWORK = small(task="correspondence").eval()
CELLS = 16
sides = st.integers(20, 300)
sizes = st.tuples(sides, sides)


def photo(seed=0, width=90, height=60):
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def mirror():
    """The flow between a photo and its mirror image: cell j goes to cell CELLS - 1 - j."""
    columns = torch.arange(CELLS)
    return torch.stack([(CELLS - 1 - 2 * columns).expand(CELLS, CELLS), torch.zeros(CELLS, CELLS)]).float()


@pytest.fixture(scope="module")
def matcher():
    return vat.Matcher(NETWORK, "cpu")


@pytest.fixture
def mirrored(matcher, monkeypatch):
    """A match of a photo and its mirror image by a network that knows."""
    monkeypatch.setattr(matcher.engine, "flows", lambda source, target: (mirror(), mirror()))
    source = photo(width=160, height=96)
    target = source.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return matcher.match(source, target, [(20, 30), (100.5, 64), (140, 80)])


# -- geometry ------------------------------------------------------------------------------------------------


@given(sizes, sizes, st.integers(0, 99))
def test_no_flow_keeps_the_place_in_the_photo(start, end, seed):
    share = torch.from_numpy(np.random.default_rng(seed).uniform(0, 1, (5, 2))).float()
    points = share * torch.tensor(start) - 0.5
    moved = carry(torch.zeros(2, CELLS, CELLS), points, start, end)
    torch.testing.assert_close((moved + 0.5) / torch.tensor(end), share, atol=1e-4, rtol=0)
    assert agreement(carry(torch.zeros(2, 4, 4), moved, end, start), points, start).min() > 0.999


@given(sizes, sizes, st.integers(0, 99))
def test_all_pixels_go_where_single_points_go(start, end, seed):
    flow = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed))
    dense = dense_positions(flow, start, end)
    assert dense.shape == (start[1], start[0], 2)
    x, y = (torch.randint(side, (20,), generator=torch.Generator().manual_seed(seed)) for side in start)
    points = torch.stack([x, y], 1).float()
    torch.testing.assert_close(dense[y, x], carry(flow, points, start, end), atol=1e-2, rtol=0)


def test_points_move_as_in_the_evaluation():
    """At whole pixels of the network's own square, where the protocol rounds nothing."""
    flow = torch.randn(2, CELLS, CELLS)
    points = torch.randint(96, (1, 30, 2)).float()
    expected = transfer_points(flow[None], points, 96)[0]
    torch.testing.assert_close(carry(flow, points[0], (96, 96), (96, 96)), expected, atol=1e-3, rtol=0)


def test_a_mirrored_photo_is_matched_exactly(mirrored):
    width = mirrored.source.width
    np.testing.assert_allclose(mirrored.matched[:, 0], width - 1 - mirrored.points[:, 0], atol=1e-3)
    np.testing.assert_allclose(mirrored.matched[:, 1], mirrored.points[:, 1], atol=1e-3)
    assert mirrored.confidence.min() > 0.999
    assert mirrored.certainty.min() > 0.999
    x = np.arange(10, width - 10)  # a flow says nothing beyond the centres of its outermost cells
    np.testing.assert_allclose(mirrored.flow[40, x, 0], width - 1 - x, atol=1e-3)


def test_the_warped_source_looks_like_the_target(mirrored):
    warped, target = (np.array(p, dtype=float)[10:-10, 10:-10] for p in (mirrored.warp(), mirrored.target))
    assert mirrored.warp().size == mirrored.target.size
    assert np.abs(warped - target).mean() < 2
    assert np.abs(np.array(mirrored.source, dtype=float)[10:-10, 10:-10] - target).mean() > 20


def test_points_that_do_not_return_are_not_trusted():
    there, back = torch.zeros(2, CELLS, CELLS), torch.zeros(2, CELLS, CELLS)
    back[0, :, CELLS // 2 :] = 4  # a quarter of the photo
    certainty = dense_agreement(there, back, (80, 60), (80, 60))
    assert certainty.shape == (60, 80)
    assert certainty[:, :30].min() > 0.99
    assert certainty[:, 50:].max() < 0.01
    moved = torch.tensor([[5.0, 0.0]])
    assert agreement(moved, torch.zeros(1, 2), (100, 50)).item() == pytest.approx(np.exp(-1))


# -- the network ---------------------------------------------------------------------------------------------


def test_both_flows_are_those_of_the_network(matcher):
    source, target = (torch.from_numpy(np.array(photo(i, 96, 96))).permute(2, 0, 1) for i in (0, 1))
    there, back = matcher.engine.flows(source, target)
    a, b = NETWORK.normalize(source[None]), NETWORK.normalize(target[None])
    with torch.inference_mode():
        torch.testing.assert_close(there, NETWORK(a, b)[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(back, NETWORK(b, a)[0], rtol=1e-3, atol=1e-4)


def test_a_match_of_photos_of_different_sizes(matcher):
    match = matcher.match(photo(0, 90, 60), photo(1, 50, 120), [(0, 0), (89, 59)])
    assert match.flow.shape == (120, 50, 2)
    assert match.certainty.shape == (120, 50)
    assert (match.matched >= 0).all()
    assert (match.matched <= [49, 119]).all()
    assert ((match.confidence >= 0) & (match.confidence <= 1)).all()
    again = matcher.match(photo(0, 90, 60), photo(1, 50, 120), [(0, 0), (89, 59)])
    assert np.array_equal(again.matched, match.matched)


def test_cats_matches_too():
    network = vat.create_model("cats", backbone="resnet18", hyperpixels=(2, 5), grid=8, projection=32, image_size=64)
    match = vat.Matcher(network.eval(), "cpu").match(photo(0), photo(1), [(3, 4)])
    assert match.matched.shape == (1, 2)


# -- in and out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [[(90, 5)], [(-1, 5)], [(5, float("nan"))]])
def test_points_outside_are_refused(matcher, points):
    with pytest.raises(VatError, match="outside of the first photo of 90x60"):
        matcher.match(photo(), photo(1), points)


@pytest.mark.parametrize("points", [(5, 6), [(1, 2, 3)], ["a"], [(1, 2), (3,)]])
def test_points_are_pairs(matcher, points):
    with pytest.raises(VatError, match="list of"):
        matcher.match(photo(), photo(1), points)


def test_a_segmentation_model_does_not_match():
    with pytest.raises(VatError, match="for segmentation"):
        vat.Matcher(small(), "cpu")


@given(sizes, st.integers(1, 12))
def test_grids_lie_inside_and_are_even(size, count):
    points = grid_points(size, count)
    assert (points >= -0.5).all()
    assert (points <= np.array(size) - 0.5).all()
    assert max(len(np.unique(points[:, 0])), len(np.unique(points[:, 1]))) == count
    np.testing.assert_allclose(points.mean(0), (np.array(size) - 1) / 2, atol=1e-6)


def test_files_of_a_match(mirrored, tmp_path):
    paths = mirrored.save(tmp_path, "m", ("json", "csv", "picture", "warp", "flow"))
    assert [path.name for path in paths] == ["m.json", "m.csv", "m_picture.jpg", "m_warp.jpg", "m_flow.npy"]
    content = json.loads(paths[0].read_text())
    assert len(content["points"]) == 3
    assert content["points"][0]["source"] == [20, 30]
    rows = list(csv.DictReader(paths[1].open()))
    assert float(rows[0]["target_x"]) == pytest.approx(139, abs=1e-3)
    assert Image.open(paths[2]).size == (320, 96)
    assert np.array_equal(np.load(paths[4]), mirrored.flow)
    with pytest.raises(VatError, match="no output format 'gif'"):
        mirrored.save(tmp_path, formats=("gif",))


def test_the_picture_joins_each_point_with_its_match(mirrored):
    changed = np.array(mirrored.picture()) != np.hstack([np.array(mirrored.source), np.array(mirrored.target)])
    for (x, y), (u, v) in zip(mirrored.points, mirrored.matched, strict=True):
        assert changed[round(y), round(x)].any()
        assert changed[round(v), round(u) + mirrored.source.width].any()


def test_without_points_there_is_the_flow_alone(matcher, tmp_path):
    photo(0).save(tmp_path / "a.png")
    photo(1).save(tmp_path / "b.png")
    match = matcher.match(tmp_path / "a.png", tmp_path / "b.png")
    assert match.name == "a-b"
    assert match.points.shape == match.matched.shape == (0, 2)
    assert match.picture().size == (180, 60)
