"""From labelled photos to masks: what goes in, what comes out, and what must not matter."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms.v2.functional import resize as resize_as_in_training

import vat
from photos import disc, examples, photo
from small import small
from vat.errors import VatError
from vat.predict.engine import shrink_mask
from vat.predict.tiles import blending_window, tile_boxes
from vat.resize import resize_photo
from vat.segmenter import posterior

NETWORK = small().eval()
ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def fitted():
    return vat.Segmenter(NETWORK, "cpu").fit({"disc": examples(2), "other": examples(1, start=5)})


@pytest.fixture(scope="module")
def learnt():
    """A segmenter that truly finds red discs: nearest colours of an untrained first stage."""
    torch.manual_seed(0)
    network = vat.create_model("prototype", backbone="resnet18", levels=(2,), image_size=96)
    return vat.Segmenter(network.eval(), "cpu").fit(*zip(*examples(3), strict=True))


def iou(a, b):
    return np.count_nonzero(a & b) / np.count_nonzero(a | b)


# -- results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"flip": True}, {"scales": (1.0, 1.5)}, {"tiles": 2}])
def test_it_finds_the_object(learnt, options):
    result = learnt.predict(photo(9, 150, 200), **options)
    assert result.classes == ("object",)
    assert result.mask.shape == result.probability.shape == (150, 200)
    assert iou(result.mask, disc(9, 150, 200)) > 0.75


def test_a_threshold_moves_the_border(learnt):
    sizes = [learnt.predict(photo(9), threshold=t).mask.mean() for t in (0.3, 0.5, 0.7)]
    assert sizes[0] > sizes[1] > sizes[2] > 0


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_class_that_is_not_sure_to_be_there_gets_no_mask(fitted, overlapping):
    options = {"threshold": 0.0, "overlapping": overlapping}
    plain = fitted.predict(photo(7), **options)
    there, missing = sorted(plain.confidence, key=plain.confidence.get, reverse=True)
    least = sum(plain.confidence.values()) / 2
    result = fitted.predict(photo(7), **options, min_confidence=least)
    assert result.confidence == plain.confidence
    assert not result.masks[missing].any()
    alone = vat.Segmenter(NETWORK, "cpu").fit({there: examples(2) if there == "disc" else examples(1, start=5)})
    np.testing.assert_array_equal(result.masks[there], alone.predict(photo(7), **options).masks[there])
    assert not fitted.predict(photo(7), **options, min_confidence=1.0).mask.any()
    with pytest.raises(VatError, match="min_confidence is 2"):
        fitted.predict(photo(7), min_confidence=2)


def test_confidence_is_that_of_the_class_alone(fitted, learnt):
    for name, pairs in (("disc", examples(2)), ("other", examples(1, start=5))):
        alone = vat.Segmenter(NETWORK, "cpu").fit({name: pairs}).predict(photo(7))
        assert alone.confidence[name] == pytest.approx(fitted.predict(photo(7)).confidence[name], abs=1e-6)
        assert alone.confidence[name] == pytest.approx(alone.probability.max(), abs=1e-6)
    with_disc = learnt.predict(photo(9)).confidence["object"]
    assert with_disc > learnt.predict(np.full((60, 90, 3), 128, np.uint8)).confidence["object"]


def test_classes_compete_with_each_other_and_the_background(fitted):
    result = fitted.predict(photo(7))
    total = result.probabilities.sum(0)
    assert result.probabilities.shape == (2, 60, 90)
    assert 0 < total.min() <= total.max() < 1
    everything = np.concatenate([1 - total[None], result.probabilities])
    assert np.array_equal(result.label_map, everything.argmax(0))
    assert not (result.masks["disc"] & result.masks["other"]).any()
    assert np.array_equal(result.masks["disc"] | result.masks["other"], result.mask)


def test_overlapping_classes_stand_alone(fitted):
    alone = vat.Segmenter(NETWORK, "cpu").fit({"other": examples(1, start=5)}).predict(photo(7))
    result = fitted.predict(photo(7), overlapping=True)
    np.testing.assert_allclose(result.probabilities[1], alone.probability, atol=1e-6)
    assert np.count_nonzero(result.masks["other"] != alone.mask) <= 1


def test_the_posterior_of_one_class_is_its_own_probability():
    scores = torch.randn(1, 4, 5)
    torch.testing.assert_close(posterior(scores), scores.sigmoid())


def test_one_example_gives_what_the_network_gives():
    image, mask = photo(0), disc(0)
    query = photo(1)
    result = vat.Segmenter(NETWORK, "cpu").fit(image, mask).predict(query)
    square = [np.array(p.resize((96, 96), Image.Resampling.BILINEAR)) for p in (query, image)]
    inputs = [NETWORK.normalize(torch.from_numpy(s).permute(2, 0, 1)[None]) for s in square]
    with torch.inference_mode():
        output = NETWORK.decode(
            NETWORK.encode_query(inputs[0]), NETWORK.encode_support(inputs[1], shrink_mask(mask, 96)[None])
        )
        logits = NETWORK.finish(output, (60, 90))
    assert np.abs(result.probability - logits.softmax(1)[0, 1].numpy()).max() < 0.02


# -- what must not matter ------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(st.permutations(range(3)))
def test_the_order_of_examples_does_not_matter(order):
    def probability(pairs):
        return vat.Segmenter(NETWORK, "cpu").fit({"disc": pairs}).predict(photo(7)).probability

    pairs = examples(3)
    np.testing.assert_allclose(probability([pairs[i] for i in order]), probability(pairs), atol=1e-5)


@settings(max_examples=4, deadline=None)
@given(st.permutations(range(3)))
def test_neither_company_nor_history_matters(fitted, order):
    photos = [photo(20 + i, 50 + 7 * i, 80 - 5 * i) for i in range(3)]
    together = fitted.predict_batch([photos[i] for i in order])
    for i, result in zip(order, together, strict=True):
        assert np.array_equal(result.probabilities, fitted.predict(photos[i]).probabilities)


@pytest.mark.parametrize("batch_size", [2, 8])
def test_the_batch_size_does_not_matter(fitted, batch_size):
    other = vat.Segmenter(NETWORK, "cpu", batch_size=batch_size)
    other.fit({"disc": examples(2), "other": examples(1, start=5)})
    expected, found = fitted.predict(photo(7)), other.predict(photo(7))
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 8))
def test_results_have_the_size_and_orientation_of_the_photo(fitted, tmp_path_factory, height, width, orientation):
    upright = photo(3, height, width)
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # how a camera held like this stores it
    stored = upright.transpose(Image.Transpose(turns[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = tmp_path_factory.mktemp("turned") / "photo.png"
    stored.save(file, exif=exif)
    result = fitted.predict(file)
    assert result.label_map.shape == (height, width)
    assert np.array_equal(np.array(result.image), np.array(upright))
    assert np.array_equal(result.probabilities, fitted.predict(upright).probabilities)


def test_a_large_jpeg_is_decoded_small_and_comes_back_large(learnt, tmp_path):
    file = tmp_path / "large.jpg"
    photo(9, 900, 1200).save(file, quality=95)
    result = learnt.predict(file)
    assert result.size == (900, 1200)
    assert result.image.size == (1200, 900)
    assert iou(result.mask, disc(9, 900, 1200)) > 0.75
    opened = Image.open(file)
    assert iou(learnt.predict(opened).mask, result.mask) > 0.95
    assert opened.size == (1200, 900)


def test_threads_get_what_one_caller_gets(fitted):
    photos = [photo(30 + i) for i in range(6)]
    expected = [fitted.predict(p).probabilities for p in photos]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda p: fitted.predict(p).probabilities, photos))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_photo_is_encoded_once_and_examples_are_decoded_one_by_one(monkeypatch):
    segmenter = vat.Segmenter(NETWORK, "cpu").fit({"a": examples(3), "b": examples(2)})
    queries, batches = [], []
    model = segmenter.engine._model
    encode, decode = model.encode_query, model.decode
    monkeypatch.setattr(model, "encode_query", lambda x, *f: queries.append(len(x)) or encode(x, *f))
    monkeypatch.setattr(model, "decode", lambda q, s: batches.append(len(s.stacked[5])) or decode(q, s))
    segmenter.predict(photo(7))
    assert queries == [1]
    assert batches == [1] * 5


# -- examples ------------------------------------------------------------------------------------------------


def test_fit_replaces_and_add_appends():
    segmenter = vat.Segmenter(NETWORK, "cpu", batch_size=2).fit({"a": examples(1)})
    segmenter.fit({"b": examples(1), "c": examples(1, 3)})
    segmenter.add("b", photo(1), disc(1)).add("d", photo(2), disc(2))
    assert segmenter.classes == ["b", "c", "d"]
    assert segmenter.shots == {"b": 2, "c": 1, "d": 1}
    at_once = vat.Segmenter(NETWORK, "cpu").fit({"b": examples(2), "c": examples(1, 3), "d": examples(1, 2)})
    found, expected = segmenter.predict(photo(8)), at_once.predict(photo(8))
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)


def test_add_encodes_nothing_again(fitted, monkeypatch):
    segmenter = vat.Segmenter(NETWORK, "cpu").fit(photo(0), disc(0))
    calls = []
    encode = segmenter.engine.encode_example
    monkeypatch.setattr(segmenter.engine, "encode_example", lambda *a: calls.append(a) or encode(*a))
    segmenter.add("object", photo(1), disc(1))
    assert len(calls) == 1


def test_a_refused_example_changes_nothing(fitted):
    before = fitted.shots
    with pytest.raises(VatError, match="all black"):
        fitted.fit({"x": [(photo(0), disc(0)), (photo(1), np.zeros((60, 90), dtype=bool))]})
    assert fitted.shots == before


def test_a_hair_survives_the_shrinking_of_its_mask():
    mask = np.zeros((2000, 2000), dtype=bool)
    mask[:, 1003] = True
    assert shrink_mask(mask, 96).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "no example"),
        (([photo()], [disc(), disc()]), "1 images came with 2"),
        ((photo(),), "masks are missing"),
        (({"a": []},), "no example"),
        (({"a": [photo()]},), "pairs"),
        (({3: examples(1)},), "name in words"),
        (("nowhere",), "neither a folder"),
    ],
)
def test_wrong_examples_are_refused_in_one_sentence(fitted, arguments, message):
    with pytest.raises(VatError, match=message):
        fitted.fit(*arguments)


@pytest.mark.parametrize(
    "options", [{"threshold": 2}, {"tiles": 0}, {"tiles": "some"}, {"scales": ()}, {"scales": (9.0,)}]
)
def test_wrong_options_are_refused(fitted, options):
    with pytest.raises(VatError, match=next(iter(options))):
        fitted.predict(photo(), **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "abacus"}, "no device"),
        ({"device": "cuda:99"}, "CUDA finds"),
        ({"precision": "int3"}, "no precision"),
        ({"image_size": 3}, "image_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"model": small(task="correspondence")}, "for correspondence"),
        ({"model": "nowhere.safetensors"}, "no file"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(VatError, match=message):
        vat.Segmenter(**({"model": NETWORK} | settings))


def test_predicting_needs_examples():
    with pytest.raises(VatError, match="call fit"):
        vat.Segmenter(NETWORK, "cpu").predict(photo())


# -- folders and files ---------------------------------------------------------------------------------------


def test_a_folder_with_a_bad_file(fitted, tmp_path):
    (tmp_path / "sub").mkdir()
    photo(0).save(tmp_path / "b.png")
    photo(1).save(tmp_path / "sub" / "a.jpg")
    (tmp_path / "a.jpg").write_bytes(b"no photo")
    with pytest.raises(VatError, match=r"a\.jpg"):
        list(fitted.predict_folder(tmp_path))
    bad = []
    results = list(fitted.predict_folder(tmp_path, on_error=lambda path, error: bad.append(path.name)))
    assert [result.name for result in results] == ["b.png", "sub/a.jpg"]
    assert bad == ["a.jpg"]
    assert [r.name for r in fitted.predict_folder(tmp_path, recursive=False, on_error="skip")] == ["b.png"]
    saved = [path for result in results for path in result.save(tmp_path / "out")]
    assert saved == [tmp_path / "out" / "b.png", tmp_path / "out" / "sub" / "a.png"]


def test_pictures_of_a_result(fitted, tmp_path):
    result = fitted.predict(photo(7), threshold=0.4)
    paths = result.save(tmp_path, "x", ("png", "overlay", "probability", "cutout", "coco"))
    names = {path.name for path in paths}
    assert names >= {"x.png", "x_overlay.jpg", "x_probability_disc.png", "x_probability_other.png", "x_cutout.png"}
    assert all(path.is_file() for path in paths)
    assert np.array_equal(np.array(Image.open(tmp_path / "x.png")), result.label_map)
    assert np.array_equal(np.array(Image.open(tmp_path / "x_cutout.png"))[..., 3] > 0, result.mask)
    changed = (np.array(result.overlay()) != np.array(result.image)).any(-1)
    assert result.mask.any()
    assert not changed[~result.mask].any()
    with pytest.raises(VatError, match="no output format 'jpeg2000'"):
        result.save(tmp_path, formats=("jpeg2000",))


def test_a_saved_mask_is_an_example_again(learnt, tmp_path):
    result = learnt.predict(photo(9))
    (path,) = result.save(tmp_path, "mask")
    assert set(np.unique(np.array(Image.open(path).convert("L")))) == {0, 255}
    assert learnt.shots == {"object": 3}
    again = vat.Segmenter(learnt.engine.network, "cpu").fit(photo(9), path)
    assert iou(again.predict(photo(9)).mask, result.mask) > 0.7


@pytest.mark.parametrize("family", ["vat", "prototype"])
def test_a_saved_segmenter_needs_neither_photos_nor_model_file(tmp_path, family):
    overrides = {"backbone": "resnet18", "image_size": 64}
    network = NETWORK if family == "vat" else vat.create_model(family, **overrides).eval()
    segmenter = vat.Segmenter(network, "cpu", batch_size=2).fit({"a": examples(1), "b": examples(2)})
    segmenter.save(tmp_path / "fitted.safetensors")
    other = vat.Segmenter.load(tmp_path / "fitted.safetensors", "cpu", batch_size=2)
    assert other.shots == segmenter.shots
    assert np.array_equal(other.predict(photo(7)).probabilities, segmenter.predict(photo(7)).probabilities)
    segmenter.save(tmp_path / "half.safetensors", dtype=torch.float16)
    half = vat.Segmenter.load(tmp_path / "half.safetensors", "cpu").predict(photo(7))
    np.testing.assert_allclose(half.probabilities, segmenter.predict(photo(7)).probabilities, atol=0.02)


def test_damaged_files_of_segmenters_are_refused(fitted, tmp_path):
    file = tmp_path / "fitted.safetensors"
    fitted.save(file)
    content = bytearray(file.read_bytes())
    content[-1] ^= 255
    file.write_bytes(content)
    with pytest.raises(VatError, match="damaged"):
        vat.Segmenter.load(file)
    vat.save(NETWORK, file)
    with pytest.raises(VatError, match=r"not a file that Segmenter\.save wrote"):
        vat.Segmenter.load(file)


# -- tiles ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 6))
def test_tiles_cover_the_photo_and_their_windows_never_vanish(height, width, count):
    covered = np.zeros((height, width))
    boxes = tile_boxes(height, width, count)
    for top, left, h, w in boxes:
        assert 0 <= top <= top + h <= height
        assert 0 <= left <= left + w <= width
        covered[top : top + h, left : left + w] += blending_window(h, w).numpy()
    assert covered.min() > 0
    assert len(boxes) >= count


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu(fitted):
    gpu = vat.Segmenter(NETWORK, "cuda").fit({"disc": examples(2), "other": examples(1, start=5)})
    expected = fitted.predict(photo(7)).probabilities
    found = [gpu.predict(photo(7)).probabilities for _ in range(4)]  # plainly, recorded, and replayed twice
    assert all(np.array_equal(found[1], other) for other in found[2:])
    for probabilities in found:
        np.testing.assert_allclose(probabilities, expected, atol=0.05)


@pytest.mark.parametrize("shape", [(48, 64), (32, 32), (9, 100)])
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_photos_are_resized_as_in_training(monkeypatch, shape, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    pixels = torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for view in (pixels.permute(2, 0, 1), pixels.permute(2, 0, 1).flip(-1), pixels.permute(2, 0, 1)[:, 2:8, 3:30]):
        assert torch.equal(resize_photo(view, 32), resize_as_in_training(view, [32, 32], antialias=True))
