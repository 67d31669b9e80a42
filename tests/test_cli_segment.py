"""`vat segment` as a person or a script meets it."""

import json
import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from command import VAT, mask, photo
from command import models as models
from command import run as run
from vat.images import read_mask


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with examples of two classes and four photos, two of them of the same name."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("cat", "dog")):
        photo(tmp_path / f"examples/{name}/1.jpg", seed=number)
        mask(tmp_path / f"examples/{name}/1.png")
    for number, name in enumerate(("a/1.jpg", "b/1.jpg", "b/c/2.png", "3.jpg")):
        photo(tmp_path / "photos" / name, seed=10 + number)
    return tmp_path


@pytest.fixture
def segment(run, models):
    def call(*arguments, **options):
        return run("segment", "--model", models["segmentation"], "--device", "cpu", *arguments, **options)

    return call


PHOTOS = ["3", "a/1", "b/1", "b/c/2"]
ONE = ("--support", "examples/cat/1.jpg", "--mask", "examples/cat/1.png")


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def seen(folder):
    return [name for name in files(folder) if not name.startswith(".")]


def test_masks_have_the_size_of_the_photos_and_keep_their_folders(place, segment):
    said = segment("photos", *ONE, "--out", "masks")
    assert "4 done" in said
    assert seen(place / "masks") == [f"{name}.png" for name in PHOTOS]
    for name in PHOTOS:
        labels = read_mask(place / f"masks/{name}.png")
        assert labels.shape == (60, 80)
        assert set(np.unique(labels)) <= {0, 1}


def test_every_format_is_written(place, segment):
    formats = "png,overlay,probability,cutout,coco,yolo,html"
    said = json.loads(segment("photos", "--supports", "examples", "--out", "m", "--format", formats, "--json"))
    assert said["classes"] == ["cat", "dog"]
    assert (said["done"], said["skipped"], said["failed"]) == (4, 0, [])
    assert said["written"] == ["instances.json", "data.yaml", "index.html"]
    assert said["photos_per_second"] > 0
    endings = (".png", ".txt", "_overlay.jpg", "_cutout.png", "_probability_cat.png", "_probability_dog.png")
    expected = {f"{name}{ending}" for name in PHOTOS for ending in endings}
    assert set(seen(place / "m")) == expected | set(said["written"])
    assert {file for entry in said["photos"] for file in entry["files"]} == expected
    coco = COCO(place / "m/instances.json")
    assert [image["file_name"] for image in coco.loadImgs(coco.getImgIds())] == [
        "3.jpg",
        "a/1.jpg",
        "b/1.jpg",
        "b/c/2.png",
    ]
    for number, name in enumerate(PHOTOS, 1):
        labels = read_mask(place / f"m/{name}.png")
        for category in (1, 2):
            found = [coco.annToMask(a) for a in coco.loadAnns(coco.getAnnIds(imgIds=number, catIds=category))]
            np.testing.assert_array_equal(np.any([np.zeros((60, 80)), *found], axis=0), labels == category)
    assert Image.open(place / "m/3_cutout.png").mode == "RGBA"
    assert (place / "m/index.html").read_text().count("<figure ") == 4


def test_what_is_done_is_skipped_until_something_changes(place, segment):
    def again(*arguments):
        said = json.loads(segment("photos", "--supports", "examples", "--out", "m", *arguments, "--json"))
        return said["done"], said["skipped"]

    assert again() == (4, 0)
    written = (place / "m/3.png").stat().st_mtime_ns
    assert again() == (0, 4)
    assert (place / "m/3.png").stat().st_mtime_ns == written
    assert again("--format", "png,overlay") == (4, 0), "a new format"
    assert again("--threshold", "0.7") == (4, 0), "another option"
    photo(place / "photos/3.jpg", seed=99)
    photo(place / "photos/new.jpg", seed=100)
    assert again("--threshold", "0.7") == (2, 3), "one photo changed and one is new"
    photo(place / "examples/dog/1.jpg", seed=101)
    assert again("--threshold", "0.7") == (5, 0), "another example"
    assert again("--threshold", "0.7", "--restart") == (5, 0)
    assert again("--threshold", "0.7", "--min-confidence", "0.9") == (5, 0)


def test_photos_without_the_thing_can_be_left_alone(place, segment):
    said = segment("photos", *ONE, "--out", "m", "--format", "png,html", "--min-confidence", "1", "--json")
    assert not any(read_mask(place / f"m/{name}.png").any() for name in PHOTOS)
    sure = [found["confidence"]["object"] for found in json.loads(said)["photos"]]
    assert all(0 < value < 1 for value in sure)
    page = (place / "m/index.html").read_text()
    assert page.count("nothing found") == len(PHOTOS)
    assert sorted(map(float, re.findall(r"object&quot;, (0[.\d]+)", page))) == sorted(sure)


def test_one_bad_file_is_named_and_the_rest_is_done(place, segment):
    (place / "photos/b/bad.jpg").write_bytes(b"no photo")
    complaint = segment("photos", *ONE, "--out", "m", "--quiet", code=1)
    assert "b/bad.jpg" in complaint
    assert "not an image" in complaint
    assert len(complaint.strip().splitlines()) == 1
    assert seen(place / "m") == [f"{name}.png" for name in PHOTOS]
    segment("photos", *ONE, "--out", "m", code=1)
    photo(place / "photos/b/bad.jpg")
    assert "1 done, 4 were done before" in segment("photos", *ONE, "--out", "m")


def test_examples_may_be_kept_and_used_without_the_photos(place, segment, run):
    segment("photos", "--supports", "examples", "--out", "m", "--save-fitted", "pets.safetensors")
    run("segment", "photos", "--fitted", "pets.safetensors", "--out", "n", "--device", "cpu")
    for name in PHOTOS:
        np.testing.assert_array_equal(read_mask(place / f"m/{name}.png"), read_mask(place / f"n/{name}.png"))
    again = run("segment", "photos", "--fitted", "pets.safetensors", "--out", "n", "--device", "cpu")
    assert "0 done, 4 were done before" in again
    assert "cat" in segment(*ONE, "--class", "cat", "--save-fitted", "cat.safetensors")
    assert (place / "cat.safetensors").stat().st_size > 0


def test_overlapping_classes_have_a_mask_each(place, segment):
    segment("photos/3.jpg", "--supports", "examples", "--out", "m", "--overlapping", "--threshold", "0")
    assert seen(place / "m") == ["3_cat.png", "3_dog.png"]
    for name in ("cat", "dog"):
        assert read_mask(place / f"m/3_{name}.png").all(), "at threshold 0 every class has every pixel"


def test_views_change_the_probabilities(place, segment):
    def probability(folder, *arguments):
        segment("photos/3.jpg", *ONE, "--out", folder, "--format", "probability", *arguments)
        return np.asarray(Image.open(place / folder / "3_probability.png")).astype(int)

    plain = probability("plain")
    for number, arguments in enumerate((("--flip",), ("--scales", "1,1.5"), ("--tiles", "2"), ("--size", "64"))):
        assert (probability(f"view{number}", *arguments) != plain).any(), arguments


def test_examples_and_results_inside_the_photos_are_no_photos(place, segment):
    os.rename(place / "examples", place / "photos/examples")
    for done, skipped in ((4, 0), (0, 4)):
        said = segment("photos", "--supports", "photos/examples", "--out", "photos/masks", "--json")
        assert (json.loads(said)["done"], json.loads(said)["skipped"]) == (done, skipped)


def test_frames_of_a_video(place, segment):
    av = pytest.importorskip("av")
    with av.open("clip.mp4", "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for level in range(0, 250, 50):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 48), (level, 60, 60)))))
        container.mux(stream.encode())
    segment("clip.mp4", *ONE, "--every", "2", "--out", "m")
    assert seen(place / "m") == ["clip/000000.png", "clip/000002.png", "clip/000004.png"]
    assert read_mask(place / "m/clip/000002.png").shape == (48, 64)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("photos",), "There are no examples"),
        (("photos", *ONE, "--supports", "examples"), "Give the examples in one way"),
        (("photos", *ONE, "--support", "examples/dog/1.jpg"), "2 --support and 1 --mask"),
        (ONE, "Name the photos"),
        (("absent", *ONE), "no file or folder 'absent'"),
        (("*.gif", *ONE), "No photo or video matches"),
        (("photos", "--supports", "absent"), "absent"),
        (("photos", "--support", "absent.jpg", "--mask", "examples/cat/1.png"), "absent.jpg"),
        (("photos", *ONE, "--format", "png,gif"), "no output format 'gif'"),
        (("photos", *ONE, "--tiles", "many"), "--tiles is 'many'"),
        (("photos", *ONE, "--tiles", "99"), "99"),
        (("photos", *ONE, "--scales", "1,x"), "--scales is '1,x'"),
        (("photos", *ONE, "--threshold", "2"), "--threshold"),
        (("photos", *ONE, "--device", "tpu"), "tpu"),
        (("photos", *ONE, "--model", "absent"), "no file or built-in model 'absent'"),
        (("photos", *ONE, "--out", "photos"), "among the photos"),
        (("photos", *ONE, "--out", "photos/3.jpg/masks"), "cannot be written to"),
        (("photos/b/c/2.png", *ONE, "--out", "photos/b/c"), "would overwrite"),
        (("examples/cat/1.jpg", *ONE, "--out", "examples/cat"), "would overwrite"),
        (("photos", "--fitted", "photos/3.jpg"), "leave --model and --size out"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(place, segment, arguments, sentence):
    before = files(place)
    assert sentence in segment(*arguments, code=2)
    assert files(place) == before


def test_an_empty_folder_is_named_as_it_was_given(place, segment):
    (place / "empty").mkdir()
    assert "The folder 'empty' holds no photo" in segment("empty", *ONE, code=2)


def many(place, count):
    for number in range(count):
        photo(place / f"many/{number:03}.jpg", seed=number)


def start(models, *arguments):
    command = [VAT, "segment", *arguments, "--model", models["segmentation"], "--device", "cpu"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_interrupted_run_goes_on(place, models, segment):
    many(place, 40)
    process = start(models, "many", *ONE, "--out", "m", "--format", "png,coco")
    while not list((place / "m").rglob("*.png")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on from there" in errors
    assert "Traceback" not in errors
    kept = len(list((place / "m").rglob("[0-9]*.png")))
    assert f"{kept} of 40 photos" in errors
    for name in (place / "m").rglob("*.png"):
        read_mask(name)
    said = json.loads(segment("many", *ONE, "--out", "m", "--format", "png,coco", "--json"))
    assert (said["done"], said["skipped"]) == (40 - kept, kept)
    assert len(json.loads((place / "m/instances.json").read_text())["images"]) == 40


def test_two_runs_at_once_fill_one_folder(place, models):
    many(place, 12)
    halves = [[f"many/{n:03}.jpg" for n in range(12) if n % 2 == part] for part in (0, 1)]
    runs = [start(models, *half, *ONE, "--out", "m", "--format", "png,coco,html") for half in halves]
    for process in runs:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    assert len(json.loads((place / "m/instances.json").read_text())["images"]) == 12
    assert (place / "m/index.html").read_text().count("<figure ") == 12
    assert [name for name in files(place / "m") if name.split("/")[-1].startswith(".")] == []
