"""What the page does behind its buttons: sessions, masks on their way to the browser and back, downloads."""

import io
import json
import zipfile
from threading import Timer

import numpy as np
import pytest
from PIL import Image

from photos import disc, photo
from vat.errors import VatError
from vat.images import encoded
from vat.matcher import grid_shape
from vat.predict.results import Segmentation
from vat.segmenter import decide as decide_scores
from vat.web import views
from vat.web.archive import pack
from vat.web.photos import LOOKS, Photo, decide, draw_tile, from_runs, shrink, to_runs
from vat.web.samples import PAIRS, SAMPLES, fill, pair
from vat.web.session import AWAY_SECONDS, MAX_QUERIES, Progress, Session, Sessions

PIXELS = 10**7


class FakeService:
    """Finds everything that is red, and counts how often it was asked."""

    def __init__(self):
        self.asked = []

    def segment(self, supports, images):
        self.asked.append({name: len(pairs) for name, pairs in supports.items()})
        return [self._red(image, tuple(supports)) for image in images]

    def _red(self, content, classes):
        pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(np.float32)
        found = np.where(pixels[..., 0] > 150 + pixels[..., 1] / 4, 0.7, 0.2).astype(np.float32)
        maps = np.stack([found] + [np.full_like(found, 0.05)] * (len(classes) - 1))
        return Segmentation(classes, (found > 0.5).astype(np.uint8), maps, content)


def png(seed=0, **size):
    return encoded(photo(seed, **size), "PNG")


def stroke(session, labels, key=None, classes=None):
    key = session.current if key is None else key
    return {"key": key, "classes": classes or session.classes, "runs": to_runs(labels), "touched": True}


def painted_session(queries=3):
    session = Session(PIXELS)
    session.add_examples([png()])
    session.paint(stroke(session, disc().astype(np.uint8)))
    session.add_queries(png(seed) for seed in range(1, 1 + queries))
    return session


def predict(session, service):
    return list(views.predictions(session, service))


# -- masks -----------------------------------------------------------------------------------------------------------


def test_a_mask_survives_the_way_to_the_browser_and_back():
    labels = np.random.default_rng(0).integers(0, 3, (17, 23)).astype(np.uint8)
    assert np.array_equal(from_runs(json.loads(json.dumps(to_runs(labels))), (23, 17), 2), labels)


@pytest.mark.parametrize(
    "runs",
    [None, "text", [1], [0, 5], [0, -6, 0, 12], [3, 6], [-1, 6], [0, 10**12], [0, 2**70], {"a": 1}, [[0, 3], [1]]],
    ids=str,
)
def test_a_mask_that_is_none_is_refused(runs):
    with pytest.raises(VatError, match="painted mask"):
        from_runs(runs, (3, 2), 2)


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
def test_thresholds_decide_as_the_segmenter_does(classes, threshold):
    import torch

    scores = torch.randn(classes, 20, 30, generator=torch.Generator().manual_seed(0)) * 2
    expected = decide_scores(probabilities := scores.clone(), threshold, False).numpy()
    assert np.array_equal(decide(probabilities.numpy(), tuple(range(1, classes + 1)), threshold), expected)


def test_probabilities_are_kept_small():
    kept = shrink(np.full((2, 900, 1600), 0.25, np.float32))
    assert kept.shape == (2, 216, 384)
    assert kept.dtype == np.float16
    assert np.allclose(kept, 0.25)


@pytest.mark.parametrize("look", LOOKS)
def test_tiles_are_drawn_again_only_when_something_changed(look):
    shown = Photo.read(photo(), "a.png", PIXELS)
    bare = draw_tile(shown, 0.5, look, 1)
    shown.given = disc().astype(np.uint8)
    masked = draw_tile(shown, 0.5, look, 1)
    assert masked != bare
    assert draw_tile(shown, 0.5, look, 1) is masked


# -- the loop --------------------------------------------------------------------------------------------------------


def test_nothing_is_predicted_without_an_example():
    session = Session(PIXELS)
    session.add_queries([png(1)])
    with pytest.raises(VatError, match="Paint the object"):
        predict(session, FakeService())


def test_photos_get_their_masks_one_by_one():
    session, service = painted_session(), FakeService()
    progress = (session.progress.done for _ in views.predictions(session, service))
    assert next(progress) == 0
    assert next(progress) == 1
    assert [tile["kind"] for tile in views.queries(session)["items"]] == ["found", "bare", "bare"]
    assert list(progress) == [2, 3]
    assert [tile["note"] for tile in views.queries(session)["items"]] == ["70% sure"] * 3
    found = session.queries[2].labels((90, 60), 0.5)
    assert (found == disc(1)).mean() > 0.97


def test_a_new_threshold_needs_no_network():
    session, service = painted_session(), FakeService()
    predict(session, service)
    before = views.queries(session)["items"][0]["picture"]
    session.threshold = 0.9
    assert views.queries(session)["items"][0]["picture"] != before
    assert not session.queries[2].labels((90, 60), 0.9).any()
    assert len(service.asked) == 3


def test_a_corrected_photo_becomes_an_example_and_all_others_are_predicted_again():
    session, service = painted_session(), FakeService()
    predict(session, service)
    session.select(3)
    session.paint(stroke(session, disc(2).astype(np.uint8)))
    assert [tile["kind"] for tile in views.queries(session)["items"]] == ["old", "given", "old"]
    predict(session, service)
    assert service.asked[3:] == [{"object": 2}, {"object": 2}]
    assert np.array_equal(session.queries[3].labels((90, 60), 0.5), disc(2))
    session.withdraw()
    predict(session, service)
    assert service.asked[5:] == [{"object": 1}] * 3


def test_a_prediction_is_adopted_as_it_is():
    session, service = painted_session(), FakeService()
    predict(session, service)
    session.select(2)
    session.paint({"key": 2, "classes": ["object"], "runs": [], "touched": False})
    assert session.queries[2].given is None
    session.adopt()
    assert session.queries[2].given is not None
    assert len(session.training()["object"]) == 2


def test_a_newer_run_ends_an_older_one():
    session, service = painted_session(), FakeService()
    older = views.predictions(session, service)
    next(older)
    predict(session, service)
    done = session.progress
    assert done.words.startswith("3 done")
    assert len(list(older)) == 1  # so that the page shows what is so by now
    assert session.progress == done
    predict(session, service)
    assert session.progress.words == "All photos have their masks, by 1 example."


def test_stopping_is_the_last_word():
    session, service = painted_session(), FakeService()
    stopped = views.predictions(session, service)
    next(stopped)
    session.end_run("Stopped.")
    list(stopped)
    assert session.progress == Progress(words="Stopped.")
    assert [tile["kind"] for tile in views.queries(session)["items"]] == ["bare"] * 3


def test_several_classes():
    session, service = painted_session(1), FakeService()
    labels = disc().astype(np.uint8)
    labels[:5] = 2
    session.paint(stroke(session, labels, classes=["ball", " sky  \n "]))
    assert list(session.training()) == ["ball", "sky"]
    predict(session, service)
    assert session.queries[2].found.numbers == (1, 2)
    assert views.easel(session)["classes"] == ["ball", "sky"]


def test_class_names_stay_unique_and_none_disappears():
    session = painted_session()
    session.paint({"classes": ["a", "a", ""]})
    assert session.classes == ["a", "a 2", "class 3"]
    session.paint({"classes": ["a"]})
    session.paint({"classes": ["x"] * 99})
    session.paint("nonsense")
    session.paint({"key": ["no key"], "classes": [], "touched": True})
    assert session.classes == ["a", "a 2", "class 3"]
    session.paint({"classes": ["a", "a 3", "a"]})
    assert session.classes == ["a", "a 3", "a 4"]


def test_a_photo_that_goes_takes_what_it_taught_with_it():
    session, service = painted_session(), FakeService()
    predict(session, service)
    session.remove(session.current)
    assert not session.painted()
    assert views.easel(session)["key"] is None


def test_what_cannot_be_read_is_named_and_the_rest_taken(tmp_path):
    (tmp_path / "notes.jpg").write_text("no picture")
    photo(1).save(tmp_path / "fine.png")
    session = Session(PIXELS)
    refused = session.add_queries([str(tmp_path / "notes.jpg"), str(tmp_path / "fine.png")])
    assert len(refused) == 1
    assert refused[0].startswith("notes.jpg was left out")
    assert str(tmp_path) not in refused[0]
    [gone] = session.add_queries([str(tmp_path / "gone.jpg")])
    assert gone == "gone.jpg was left out: No such file or directory."
    assert [p.name for p in session.queries.values()] == ["fine.png"]
    assert "megapixels" in Session(100).add_queries([png()])[0]


def test_there_is_room_for_so_many_photos():
    session, content = Session(PIXELS), png(height=8, width=8)
    assert "room for" in session.add_queries([content] * (MAX_QUERIES + 2))[0]
    assert len(session.queries) == MAX_QUERIES


def test_sessions_are_bounded_and_forgotten_oldest_first():
    sessions = Sessions(lambda: Session(PIXELS), most=2)
    first, _ = sessions.get("a"), sessions.get("b")
    assert sessions.get("a") is first
    sessions.get("c")
    assert len(sessions) == 2
    assert sessions.get("a") is first


def test_a_visit_may_be_returned_to_for_a_while():
    now = [0.0]
    sessions = Sessions(lambda: Session(PIXELS), clock=lambda: now[0])
    slept, open_still, _ = (sessions.get(id) for id in ("slept", "open", "closed"))
    for id in ("slept", "closed", "never seen"):
        sessions.leave(id)
    now[0] += AWAY_SECONDS - 1
    assert sessions.get("slept") is slept
    now[0] += AWAY_SECONDS - 1
    assert sessions.get("slept") is slept
    assert sessions.get("open") is open_still
    assert len(sessions) == 2


def test_a_page_that_is_loaded_again_goes_on_where_it_was(monkeypatch):
    monkeypatch.setattr("vat.web.session.RELOAD_SECONDS", 0.2)
    sessions = Sessions(lambda: Session(PIXELS))
    visit, other = sessions.get("a"), sessions.get("b")
    assert sessions.resume("", "c") is sessions.resume("never seen", "c") is None
    assert sessions.resume("b", "c") is None  # in use in another tab
    Timer(0.05, sessions.leave, ["a"]).start()
    assert sessions.resume("a", "c") is visit
    assert sessions.get("c") is visit
    assert sessions.get("b") is other
    assert len(sessions) == 2
    assert sessions.resume("a", "d") is None


# -- downloads -------------------------------------------------------------------------------------------------------


def finished_session(tmp_path):
    """A photo twice as large as what is kept of it, and two of one name."""
    session = painted_session(0)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        photo(4, 60, 90).resize((2100, 1400)).save(tmp_path / folder / "ball.jpg")
    session.add_queries([str(tmp_path / "one" / "ball.jpg"), str(tmp_path / "two" / "ball.jpg")])
    predict(session, FakeService())
    return session


def test_png_masks_have_the_size_of_the_photos(tmp_path):
    name, content = pack(finished_session(tmp_path).results(), "png")
    archive = zipfile.ZipFile(io.BytesIO(content))
    assert name == "masks.zip"
    assert set(archive.namelist()) == {"masks/photo 1.png", "masks/ball.png", "masks/ball-2.png", "classes.json"}
    mask = np.asarray(Image.open(archive.open("masks/ball.png")))
    assert mask.shape == (1400, 2100)
    assert (mask == disc(4, 1400, 2100)).mean() > 0.97
    assert json.loads(archive.read("classes.json")) == {"0": "background", "1": "object"}


def test_coco_and_yolo(tmp_path):
    session = finished_session(tmp_path)
    name, content = pack(session.results(), "coco")
    document = json.loads(content)
    assert name == "instances.json"
    assert [image["file_name"] for image in document["images"]] == ["photo 1.png", "ball.jpg", "ball-2.jpg"]
    assert {a["image_id"] for a in document["annotations"]} == {1, 2, 3}
    archive = zipfile.ZipFile(io.BytesIO(pack(session.results(), "yolo")[1]))
    assert archive.read("labels/ball.txt").startswith(b"0 0.")
    assert b"object" in archive.read("data.yaml")


def test_only_the_ending_tells_two_photos_apart(tmp_path):
    session = painted_session(0)
    for name in ("ball.jpg", "ball.png"):
        photo(4).save(tmp_path / name)
    session.add_queries([str(tmp_path / "ball.jpg"), str(tmp_path / "ball.png")])
    predict(session, FakeService())
    images = json.loads(pack(session.results(), "coco")[1])["images"]
    assert [image["file_name"] for image in images] == ["photo 1.png", "ball.jpg", "ball.png"]
    names = zipfile.ZipFile(io.BytesIO(pack(session.results(), "png")[1])).namelist()
    assert names[1:3] == ["masks/ball.png", "masks/ball-2.png"]


def test_what_the_page_shows_is_downloaded_whatever_became_of_the_examples():
    session, labels = painted_session(2), disc().astype(np.uint8)
    labels[:5] = 2
    session.paint(stroke(session, labels, classes=["ball", "sky"]))
    predict(session, FakeService())
    session.select(2)
    session.paint(stroke(session, np.where(disc(1), 2, 0).astype(np.uint8), classes=["ball", "sky", "sea"]))
    session.remove(1)
    session.remove(2)
    assert session.numbers() == ()
    [result] = session.results()
    assert result.classes == ("ball", "sky")
    assert (result.mask == disc(2)).mean() > 0.97


def test_nothing_to_download_is_said():
    with pytest.raises(VatError, match="no masks"):
        pack(Session(PIXELS).results(), "png")
    session = painted_session(0)
    session.paint(stroke(session, np.zeros((60, 90), np.uint8)))  # painted, and undone
    for kind in ("png", "coco", "yolo"):
        with pytest.raises(VatError, match="no masks"):
            pack(session.results(), kind)
    with pytest.raises(VatError, match="no download"):
        pack([], "tiff")


# -- built-in examples, correspondence -------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.title)
def test_built_in_examples_are_ready_to_predict(sample):
    session = Session(PIXELS)
    fill(session, sample)
    assert list(session.training()) == list(sample.classes)
    assert len(session.pending()) == len(session.queries) == 8
    assert all(0.005 < (labels > 0).mean() < 0.6 for _, labels in session.painted())


def test_the_grid_of_matches_is_in_the_order_the_browser_reads():
    first, _ = pair(PAIRS[0])
    across, down = grid_shape(first.view_size, views.GRID)
    points = views.board_points(first).reshape(down, across, 2)
    assert np.allclose(points[0, :, 1], points[0, 0, 1])
    assert (np.diff(points[0, :, 0]) > 0).all()
    assert "two photos" in views.board(None, None, None)["hint"]
    assert "second photo" in views.board(None, first, None)["hint"]
