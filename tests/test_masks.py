"""Every form of a mask gives the same pixels, and damaged ones one sentence."""

import base64
import io
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image, ImageFilter
from pycocotools import mask as official

from vat.errors import VatError
from vat.predict.masks import aligned_mask, from_polygons, from_rle, read_any_mask, to_rle
from vat.predict.outlines import polygon, regions

SIZE = (40, 60)
masks = arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=40))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def box(top, left, bottom, right, size=SIZE):
    mask = np.zeros(size, dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def png(mask):
    stream = io.BytesIO()
    Image.fromarray(mask).save(stream, "PNG")
    return stream.getvalue()


@given(masks)
def test_run_lengths_are_those_of_coco(mask):
    code = official.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert np.array_equal(from_rle(code), mask)
    assert np.array_equal(from_rle({"size": code["size"], "counts": code["counts"].decode()}), mask)
    assert np.array_equal(from_rle(to_rle(mask)), mask)
    assert np.array_equal(official.decode(official.frPyObjects(to_rle(mask), *mask.shape)), mask)


@given(masks)
def test_outlines_fill_to_the_mask_they_were_drawn_around(mask):
    outlines = [polygon(region, tolerance=0).ravel().tolist() for region in regions(mask)]
    assert np.array_equal(from_polygons(outlines, mask.shape), mask)


@given(st.lists(st.tuples(st.floats(-20, 80), st.floats(-20, 60)), min_size=3, max_size=12))
def test_polygons_agree_with_a_test_of_every_pixel_centre(points):
    heights = sorted(y for _, y in points)
    assume(all(a == b or b - a > 1e-3 for a, b in pairwise(heights)))  # an edge's slope must be a number
    expected = np.zeros(SIZE, dtype=bool)
    y, x = np.mgrid[: SIZE[0], : SIZE[1]] + 0.5
    for edge in zip(points, points[1:] + points[:1], strict=True):
        (x0, y0), (x1, y1) = sorted(edge, key=lambda point: point[1])
        if y0 < y1:
            expected ^= (y0 <= y) & (y < y1) & (x >= x0 + (y - y0) / (y1 - y0) * (x1 - x0))
    found = from_polygons([[v for point in points for v in point]], SIZE)
    assert np.count_nonzero(found != expected) <= 2  # centres that lie on an edge, to the last bit
    assert np.array_equal(from_polygons(points, SIZE), found)


def test_a_seam_of_no_width_leaves_no_trace():
    assert not from_polygons([[0, 0, 35, 35, 0, 0]], SIZE).any()
    ring = [5, 5, 35, 5, 35, 35, 5, 35, 5, 5, 11, 12, 11, 25, 24, 25, 24, 12, 11, 12, 5, 5]
    assert np.array_equal(from_polygons([ring], SIZE), box(5, 5, 35, 35) & ~box(12, 11, 25, 24))


@pytest.mark.parametrize(
    "form",
    [
        lambda m: m,
        lambda m: m.astype(np.uint8),
        lambda m: m.astype(np.float32),
        lambda m: Image.fromarray(m),
        png,
        to_rle,
        lambda m: [[20, 10, 50, 10, 50, 30, 20, 30]],
        lambda m: [[20, 10], [50, 10], [50, 30], [20, 30]],
        lambda m: [[20, 10, 30, 10, 30, 30, 20, 30], [30, 10, 50, 10, 50, 30, 30, 30]],
    ],
)
def test_one_box_in_many_forms(form):
    mask = box(10, 20, 30, 50)
    assert np.array_equal(read_any_mask(form(mask), SIZE), mask)


def labelme(*shapes, size=SIZE):
    return {"imageHeight": size[0], "imageWidth": size[1], "shapes": list(shapes)}


def shape(label, points, kind="polygon", **more):
    return {"label": label, "points": points, "shape_type": kind, **more}


def test_labelme_draws_every_shape_that_has_an_area(tmp_path):
    part = base64.b64encode(png(np.ones((5, 6), dtype=bool))).decode()
    content = labelme(
        shape("cat", [[20, 10], [50, 10], [50, 30], [20, 30]]),
        shape("cat", [[10, 5], [2, 1]], "rectangle"),
        shape("cat", [[3, 33], [8, 37]], "mask", mask=part),
        shape("cat", [[1, 1]], "point"),
    )
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content))
    expected = box(10, 20, 30, 50) | box(1, 2, 5, 10) | box(33, 3, 38, 9)
    assert np.array_equal(read_any_mask(file, (1, 1)), expected)
    circle = read_any_mask(labelme(shape("cat", [[30, 20], [40, 20]], "circle")), SIZE)
    assert circle.sum() == pytest.approx(np.pi * 100, rel=0.02)


def test_labelme_takes_the_shapes_of_the_class_if_it_names_them():
    content = labelme(shape("cat", [[0, 0], [9, 9]], "rectangle"), shape("dog", [[20, 20], [30, 30]], "rectangle"))
    assert np.array_equal(read_any_mask(content, SIZE, "dog"), box(20, 20, 30, 30))
    assert np.array_equal(read_any_mask(content, SIZE, "object"), box(0, 0, 9, 9) | box(20, 20, 30, 30))


def test_soft_masks_are_cut_at_half_and_class_maps_are_not(tmp_path):
    mask = box(10, 20, 30, 50)
    soft = Image.fromarray(mask).convert("L").filter(ImageFilter.GaussianBlur(2))
    assert np.count_nonzero(read_any_mask(soft, SIZE) != mask) < 30
    Image.fromarray(mask).convert("L").save(tmp_path / "a.jpg", quality=60)
    assert np.array_equal(read_any_mask(tmp_path / "a.jpg", SIZE), mask)
    assert np.array_equal(read_any_mask(mask * np.uint8(3), SIZE), mask)


def test_a_mask_must_match_its_photo():
    small = box(10, 20, 30, 50)
    assert aligned_mask(small, (80, 120)).shape == SIZE
    with pytest.raises(VatError, match="60x40 pixels, but its photo has 60x60"):
        aligned_mask(small, (60, 60))
    with pytest.raises(VatError, match="EXIF"):
        aligned_mask(small, (60, 40))
    with pytest.raises(VatError, match=r"'black\.png' is all black"):
        aligned_mask(np.zeros(SIZE, dtype=bool), SIZE, name="The mask 'black.png'")


@pytest.mark.parametrize(
    "damaged",
    [
        {"size": [40, 60], "counts": [100, 200]},
        {"size": [40, 60], "counts": [-1, 2401]},
        {"size": [10**6, 10**6], "counts": [10**12]},
        {"size": [40, 60], "counts": "ä"},
        {"size": [40, 60], "counts": "oooooooooooooooooooooooo"},
        {"counts": "1"},
        {"bbox": [1, 2, 3, 4]},
        [[1, 2, 3, 4]],
        [[1, 2, 3, 4, 5]],
        [[1, 2, 3, float("nan"), 5, 6]],
        [[10**400, 2, 3, 4, 5, 6]],
        labelme({"label": "cat"}),
        labelme(shape("cat", [[1, 2]], "rectangle")),
        labelme(shape("cat", [[1, 2], [3, 4]], "mask", mask="no")),
        labelme(size=(10**6, 10**6)),
    ],
)
def test_damaged_masks_are_refused_in_one_sentence(damaged):
    with pytest.raises(VatError, match="mask"):
        read_any_mask(damaged, SIZE)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.lists(json_values, max_size=4),
        st.fixed_dictionaries({"size": st.just([4, 5]) | json_values, "counts": st.text(max_size=12) | json_values}),
        st.fixed_dictionaries(
            {
                "imageHeight": st.just(9) | json_values,
                "imageWidth": st.just(8) | json_values,
                "shapes": st.lists(
                    st.fixed_dictionaries(
                        {
                            "label": st.just("cat") | json_values,
                            "points": st.lists(st.tuples(st.floats(), st.floats()), max_size=4) | json_values,
                            "shape_type": st.sampled_from(["polygon", "rectangle", "circle", "mask", "line", None]),
                            "mask": st.text(max_size=8) | json_values,
                        }
                    ),
                    max_size=3,
                )
                | json_values,
            }
        ),
    )
)
def test_whatever_json_comes_there_is_a_mask_or_a_sentence(content):
    try:
        mask = read_any_mask(content, (12, 10))
    except VatError:
        return
    assert mask.dtype == bool
    assert mask.ndim == 2


def test_files_that_are_no_json_say_so(tmp_path):
    for content in (b"{", b"\xff\xfe\x00", b"[" * 100_000):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(VatError, match="not valid JSON"):
            read_any_mask(tmp_path / "a.json", SIZE)
    with pytest.raises(VatError, match=r"gone\.json"):
        read_any_mask(tmp_path / "gone.json", SIZE)
