"""Labelled examples on disk, in every layout that is promised."""

import json

import pytest
from PIL import Image

import vat
from photos import disc, photo
from small import small
from vat.errors import VatError
from vat.predict.supports import read_supports

NETWORK = small().eval()


def write_pair(folder, stem, seed, photo_suffix=".jpg", mask_name="{}.png"):
    folder.mkdir(parents=True, exist_ok=True)
    photo(seed).save(folder / f"{stem}{photo_suffix}")
    Image.fromarray(disc(seed)).save(folder / mask_name.format(stem))


def test_folders_of_classes(tmp_path):
    write_pair(tmp_path / "cat", "1", 0)
    write_pair(tmp_path / "cat", "2", 1, ".png", "{}_mask.png")
    write_pair(tmp_path / "dog", "1", 2)
    (tmp_path / "dog" / "notes.txt").write_text("two dogs")
    photo(5).save(tmp_path / "dog" / "unlabelled.jpg")
    supports = read_supports(tmp_path)
    assert {name: len(pairs) for name, pairs in supports.items()} == {"cat": 2, "dog": 1}
    assert supports["cat"][1] == (tmp_path / "cat" / "2.png", tmp_path / "cat" / "2_mask.png")
    assert vat.Segmenter(NETWORK, "cpu").fit(tmp_path).shots == {"cat": 2, "dog": 1}


def test_a_flat_folder_is_one_class(tmp_path):
    write_pair(tmp_path / "cats", "1", 0)
    assert list(read_supports(tmp_path / "cats")) == ["cats"]
    (tmp_path / "none").mkdir()
    with pytest.raises(VatError, match="holds no examples"):
        read_supports(tmp_path / "none")


def test_labelme_files_name_their_classes(tmp_path):
    photo(0).save(tmp_path / "1.jpg")
    box = {"shape_type": "rectangle", "points": [[10, 10], [30, 40]]}
    content = {"imagePath": "1.jpg", "imageHeight": 60, "imageWidth": 90}
    content["shapes"] = [{"label": "cat", **box}, {"label": "dog", **box}, {"label": "cat", **box}]
    (tmp_path / "1.json").write_text(json.dumps(content))
    for place in (tmp_path, tmp_path / "1.json"):
        supports = read_supports(place)
        assert [len(mask["shapes"]) for pairs in supports.values() for _, mask in pairs] == [2, 1]
        assert vat.Segmenter(NETWORK, "cpu").fit(place).shots == {"cat": 1, "dog": 1}


def test_coco_joins_the_objects_of_an_image(tmp_path):
    (tmp_path / "images").mkdir()
    photo(0).save(tmp_path / "images" / "1.jpg")
    square = [[10, 10, 20, 10, 20, 20, 10, 20]]
    code = {"size": [60, 90], "counts": [600, 30, 4770]}
    annotations = [
        {"image_id": 7, "category_id": category, "segmentation": segmentation}
        for category, segmentation in ((1, square), (1, square), (2, square), (2, code))
    ]
    content = {
        "images": [{"id": 7, "file_name": "1.jpg"}],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
        "annotations": annotations,
    }
    file = tmp_path / "instances.json"
    file.write_text(json.dumps(content))
    supports = read_supports(file)
    assert supports["cat"][0][1] == square * 2
    assert isinstance(supports["dog"][0][1], dict)
    assert vat.Segmenter(NETWORK, "cpu").fit(tmp_path).shots == {"cat": 1, "dog": 1}
    file.write_text(json.dumps({**content, "images": [{"id": 7, "file_name": "gone.jpg"}]}))
    with pytest.raises(VatError, match=r"gone\.jpg"):
        read_supports(file)
    file.write_text(json.dumps({"annotations": 3}))
    with pytest.raises(VatError, match="not a COCO instances file"):
        read_supports(file)
