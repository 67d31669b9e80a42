"""Files for other tools, the folder that collects them, and the photos that go in."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from pycocotools.coco import COCO
from scipy.ndimage import gaussian_filter

from vat.errors import VatError
from vat.files import unique_stems
from vat.images import read_mask
from vat.predict.contact_sheet import Tile, contact_sheet, thumbnail
from vat.predict.folder import OutputFolder, fingerprint
from vat.predict.outlines import polygon, regions
from vat.predict.queries import Query, find_queries, read_queries
from vat.predict.results import Segmentation
from vat.predict.writers import yolo_lines


def blobs(height=90, width=130, seed=0, smooth=5.0):
    return gaussian_filter(np.random.default_rng(seed).normal(size=(height, width)), smooth) > 0


def result(height=90, width=130, classes=("cat", "dog"), seed=0, overlapping=False):
    masks = [blobs(height, width, seed + i) for i in range(len(classes))]
    labels = np.zeros((height, width), np.uint8)
    for number, mask in enumerate(masks, 1):
        labels[mask] = number
    probabilities = np.stack([np.where(mask, 0.9, 0.1) for mask in masks]).astype(np.float32)
    photo = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))
    return Segmentation(tuple(classes), labels, probabilities, photo, overlapping=overlapping)


def query(key="a/1", stamp=(1, 1)):
    return Query(Path(f"/photos/{key}.jpg"), f"{key}.jpg", key, stamp)


def photo(path, size=(40, 30), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 120, 200)).save(path, **options)
    return path


# ---- shapes


@pytest.mark.parametrize("smooth", [0.0, 1.0, 6.0])
def test_coco_file_gives_back_every_pixel_with_the_official_reader(tmp_path, smooth):
    mask = blobs(40, 60, smooth=smooth)
    mask[:, :3] = True  # columns that are full, where runs go on into the next
    one = Segmentation(("cat",), mask.astype(np.uint8), mask[None].astype(np.float32), Image.new("RGB", (60, 40)))
    (path,) = one.save(tmp_path, "one", ["coco"])
    coco = COCO(path)
    found = coco.loadAnns(coco.getAnnIds(catIds=coco.getCatIds(["cat"])))
    assert sum(annotation["area"] for annotation in found) == mask.sum()
    np.testing.assert_array_equal(np.any([coco.annToMask(a) for a in found], axis=0), mask)
    for annotation in found:
        rows, columns = np.nonzero(coco.annToMask(annotation))
        x, y, width, height = annotation["bbox"]
        assert (columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1) == (x, y, width, height)


def drawn(lines, number, size, zoom=8):
    """The mask that YOLO polygons of a class stand for, rasterised at several times the size."""
    picture = Image.new("L", (size[0] * zoom, size[1] * zoom))
    for line in lines.splitlines():
        kind, *values = line.split()
        if int(kind) == number:
            points = np.array(values, float).reshape(-1, 2) * picture.size
            ImageDraw.Draw(picture).polygon([tuple(p) for p in points], fill=1)
    return np.asarray(picture)[zoom // 2 :: zoom, zoom // 2 :: zoom].astype(bool)


def test_yolo_polygons_cover_the_mask():
    one = result(180, 260)
    lines = yolo_lines(one)
    for number, mask in enumerate(one.masks.values()):
        painted = drawn(lines, number, (260, 180))
        assert (painted & mask).sum() / (painted | mask).sum() > 0.97
    values = np.array([float(v) for line in lines.splitlines() for v in line.split()[1:]])
    assert values.min() >= 0
    assert values.max() <= 1


def test_a_yolo_polygon_leaves_the_hole_open():
    y, x = np.mgrid[:80, :80]
    distance = np.hypot(x - 40, y - 40)
    ring = (distance < 35) & (distance > 15)
    (region,) = regions(ring)
    points = polygon(region)
    lines = "0 " + " ".join(f"{v:.6f}" for v in (points / 80).ravel())
    painted = drawn(lines, 0, (80, 80))
    assert not painted[35:45, 35:45].any()
    assert (painted & ring).sum() / (painted | ring).sum() > 0.97
    assert len(points) < 80


def test_a_single_pixel_is_a_polygon():
    mask = np.zeros((5, 5), bool)
    mask[2, 3] = True
    (region,) = regions(mask)
    np.testing.assert_allclose(polygon(region).mean(0), (3.5, 2.5))


def test_an_empty_mask_gives_empty_files(tmp_path):
    nothing = Segmentation(
        ("cat",), np.zeros((9, 9), np.uint8), np.zeros((1, 9, 9), np.float32), Image.new("L", (9, 9))
    )
    coco, yolo = nothing.save(tmp_path, "n", ["coco", "yolo"])
    assert json.loads(coco.read_text())["annotations"] == []
    assert yolo.read_text() == ""


# ---- the page


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources, self.links, self.lazy, self.names = [], [], [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag in ("img", "script", "link", "iframe"):
            self.sources += [values.get("src") or values.get("href") or ""]
            self.lazy += [values.get("loading")] if tag == "img" else []
        if tag == "a":
            self.links.append(values["href"])
        if tag == "figure":
            self.names.append((values["data-name"], json.loads(values["data-shares"])))


def test_page_holds_its_pictures_and_loads_nothing():
    tiles = [
        Tile('<b>"x".jpg', thumbnail(result()), {"cat": 0.4, 'd"og': 0.2}, "a b/1_overlay.jpg"),
        Tile("empty.jpg", thumbnail(result()), {"cat": 0.0, 'd"og': 0.0}),
    ]
    page = contact_sheet(tiles, ["cat", 'd"og'], "<title>")
    seen = Links()
    seen.feed(page)
    assert seen.names == [('<b>"x".jpg', [["cat", 0.4], ['d"og', 0.2]]), ("empty.jpg", [])]
    assert seen.links == ["a%20b/1_overlay.jpg"]
    assert seen.lazy == ["lazy", "lazy"]
    assert all(source == "" or source.startswith("data:image/jpeg;base64,") for source in seen.sources)
    assert not re.search(r"https?://", page)
    assert "<b>" not in page
    assert "40.0%" in page
    assert "nothing found" in page


def test_thumbnail_is_small_and_keeps_the_shape():
    picture = Image.open(BytesIO(thumbnail(result(600, 1200))))
    assert picture.size == (240, 120)


# ---- the folder


def test_a_record_makes_a_photo_done_until_something_changes(tmp_path):
    output = OutputFolder(tmp_path, ["png", "coco"], "f", ["cat", "dog"])
    assert not output.is_done(query())
    output.add(query(), result())
    assert output.is_done(query())
    assert not output.is_done(query(stamp=(2, 1))), "the photo changed"
    assert not OutputFolder(tmp_path, ["png"], "g", ["cat", "dog"]).is_done(query()), "the examples changed"
    assert not OutputFolder(tmp_path, ["png", "yolo"], "f", ["cat", "dog"]).is_done(query()), "a format was added"
    (tmp_path / "a/1.png").unlink()
    assert not output.is_done(query()), "a file is gone"


def test_formats_of_several_runs_add_up(tmp_path):
    first = OutputFolder(tmp_path, ["coco"], "f", ["cat", "dog"])
    first.add(query(), result())
    second = OutputFolder(tmp_path, ["overlay"], "f", ["cat", "dog"])
    second.add(query(), result())
    assert first.is_done(query())
    first.finish()
    assert json.loads((tmp_path / "instances.json").read_text())["annotations"]


def test_a_damaged_record_is_no_record(tmp_path):
    output = OutputFolder(tmp_path, ["png"], "f", ["cat", "dog"])
    output.add(query(), result())
    for text in ("", "[]", '{"name": 1}', "{"):
        (tmp_path / ".vat/records/a/1.json").write_text(text)
        assert not output.is_done(query())


def test_two_runs_into_one_folder_end_with_everything(tmp_path):
    runs = [OutputFolder(tmp_path, ["png", "coco", "yolo", "html"], "f", ["cat", "dog"]) for _ in range(2)]
    runs[0].add(query("a/1"), result(seed=1))
    runs[1].add(query("b/1"), result(seed=2))
    runs[1].finish()
    runs[0].finish()
    document = json.loads((tmp_path / "instances.json").read_text())
    assert [image["file_name"] for image in document["images"]] == ["a/1.jpg", "b/1.jpg"]
    assert {annotation["image_id"] for annotation in document["annotations"]} == {1, 2}
    assert len({annotation["id"] for annotation in document["annotations"]}) == len(document["annotations"])
    assert (tmp_path / "index.html").read_text().count("<figure ") == 2
    assert (tmp_path / "data.yaml").read_text() == "names:\n  0: cat\n  1: dog\n"
    np.testing.assert_array_equal(read_mask(tmp_path / "b/1.png"), result(seed=2).label_map)


def test_results_of_other_classes_stay_out_of_the_coco_file(tmp_path):
    OutputFolder(tmp_path, ["coco"], "f", ["bird"]).add(query("b"), result(classes=["bird"]))
    output = OutputFolder(tmp_path, ["coco"], "g", ["cat", "dog"])
    output.add(query("a"), result())
    output.finish()
    document = json.loads((tmp_path / "instances.json").read_text())
    assert [image["file_name"] for image in document["images"]] == ["a.jpg"]


def test_unknown_format_is_named():
    with pytest.raises(VatError, match="'gif'; there are png"):
        OutputFolder(Path("x"), ["png", "gif"], "f", ["cat"])


def test_fingerprint_follows_contents_not_names(tmp_path):
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    a.write_bytes(b"1"), b.write_bytes(b"1"), c.write_bytes(b"2")
    assert fingerprint({"cat": [(a, [1, 2])]}) == fingerprint({"cat": [(b, [1, 2])]})
    others = [{"cat": [(c, [1, 2])]}, {"cat": [(a, [1, 3])]}, {"dog": [(a, [1, 2])]}, {"cat": [(a, [1, 2]), (b, [1])]}]
    assert len({fingerprint(part) for part in [{"cat": [(a, [1, 2])]}, *others]}) == 5
    masks = [np.zeros((2, 3), np.uint8), np.zeros((3, 2), np.uint8), np.zeros((2, 3), bool)]
    assert len({fingerprint(mask) for mask in masks}) == 3


# ---- queries


def test_folders_are_searched_and_names_keep_their_place(tmp_path):
    for name in ("b/1.jpg", "a/1.jpg", "a/deep/2.PNG", "3.webp", ".hidden/4.jpg", "a/.5.jpg", "masks/6.png"):
        photo(tmp_path / name)
    (tmp_path / "a/notes.txt").write_text("no photo")
    found = find_queries([tmp_path], exclude=[tmp_path / "masks"])
    assert [(q.name, q.key) for q in found] == [
        ("3.webp", "3"),
        ("a/1.jpg", "a/1"),
        ("a/deep/2.PNG", "a/deep/2"),
        ("b/1.jpg", "b/1"),
    ]


def test_files_of_several_folders_keep_the_folders_that_differ(tmp_path):
    first, second = photo(tmp_path / "x/a/1.jpg"), photo(tmp_path / "x/b/1.jpg")
    assert [q.key for q in find_queries([first, second])] == ["a/1", "b/1"]
    assert [q.key for q in find_queries([first, first])] == ["1"]


def test_photos_that_differ_in_their_suffix_alone_stay_apart(tmp_path):
    for name in ("1.jpg", "1.png", "2.jpg", "2_overlay.jpg"):
        photo(tmp_path / name)
    assert [q.key for q in find_queries([tmp_path])] == ["1.jpg", "1.png", "2", "2_overlay.jpg"]


def test_patterns_are_expanded(tmp_path):
    photo(tmp_path / "a/1.jpg"), photo(tmp_path / "a/b/2.jpg"), photo(tmp_path / "a/3.png")
    assert [q.key for q in find_queries([f"{tmp_path}/**/*.jpg"])] == ["1", "b/2"]
    strange = photo(tmp_path / "a[1].jpg")
    assert [q.path for q in find_queries([str(strange)])] == [strange]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [("none.jpg", "no file or folder"), ("*.gif", "No photo or video matches"), ("", "holds no photo")],
)
def test_sources_without_photos_are_named(tmp_path, source, sentence):
    with pytest.raises(VatError, match=sentence):
        find_queries([tmp_path / source])


def test_a_photo_that_cannot_be_read_is_an_answer_too(tmp_path):
    photo(tmp_path / "1.jpg"), photo(tmp_path / "3.jpg")
    (tmp_path / "2.jpg").write_bytes(b"no photo")
    answers = [answer for _, answer in read_queries(find_queries([tmp_path]))]
    assert isinstance(answers[1], VatError)
    assert answers[0].size == answers[2].size == (40, 30)


def video(path, frames=7):
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            picture = Image.new("RGB", (64, 48), (30 * number, 30 * number, 30 * number))
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return path


def test_frames_of_a_video_are_queries(tmp_path):
    found = find_queries([video(tmp_path / "clip.mp4")], every=3)
    assert [(q.name, q.key) for q in found] == [(f"clip.mp4#{i}", f"clip/{i:06d}") for i in (0, 3, 6)]
    for (query, picture), level in zip(read_queries(found[1:]), (90, 180), strict=True):
        assert picture.size == (64, 48), query
        assert abs(np.asarray(picture).mean() - level) < 8


def test_a_damaged_video_does_not_stop_the_photos_beside_it(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "clip.mp4").write_bytes(b"no video at all")
    photo(tmp_path / "photo.jpg")
    (_, failure), (_, picture) = read_queries(find_queries([tmp_path]))
    assert isinstance(failure, VatError)
    assert "clip.mp4" in str(failure)
    assert picture.size == (40, 30)


def test_without_the_reader_a_video_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "clip.mp4").write_bytes(b"")
    with pytest.raises(VatError, match=r"vat-fewshot\[video\]"):
        find_queries([tmp_path])


def test_writers_work_where_torch_is_not_installed():
    code = "import sys; sys.modules['torch'] = None; import vat.predict.writers, vat.predict.folder"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_names_stay_apart_on_disks_that_ignore_case():
    names = ["a/1.jpg", "1.PNG", "b/1.jpg", "One.jpg", "one.jpg", "1-2.jpg"]
    assert unique_stems(names) == ["1", "1-2", "1-3", "One", "one-2", "1-2-2"]
