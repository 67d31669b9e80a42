"""Every reader of foreign files, with whole files to start from."""

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.io import savemat

import vat
from small import small
from vat.cli.match import _read_points
from vat.data.lists import read_lines, read_plain_pickle
from vat.data.matlab import read_mat
from vat.images import image_size, read_image, read_mask
from vat.predict.masks import from_labelme, from_polygons, from_rle, read_any_mask
from vat.predict.supports import read_supports
from vat.runtime.folder import ModelFolder
from vat.training import load_experiment

MAX_PIXELS = 4_000_000


@dataclass(frozen=True)
class Reader:
    """`read` gets the path of a mutated file; anything but a result or a VatError is a defect."""

    name: str
    suffix: str
    seeds: list[bytes]
    read: Callable[[Path], Any]


def _picture(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    values = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(values).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def _pictures() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        _picture("JPEG", exif=exif),
        _picture("JPEG", "CMYK"),
        _picture("JPEG", progressive=True),
        _picture("PNG"),
        _picture("PNG", "P"),
        _picture("PNG", "RGBA"),
        _picture("GIF", "P"),
        _picture("BMP"),
        _picture("TIFF"),
        _picture("TIFF", compression="tiff_lzw"),
        _picture("WEBP"),
        _picture("PPM"),
    ]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


RLE = {"size": [6, 8], "counts": [4, 3, 5, 6, 30]}
POLYGONS = [[1, 1, 7, 1, 7, 5, 1, 5], [2.5, 2.5, 4, 4, 2, 4]]
LABELME = {
    "imageHeight": 24,
    "imageWidth": 32,
    "imagePath": "a.jpg",
    "shapes": [
        {"label": "cat", "shape_type": "polygon", "points": [[1, 1], [20, 2], [10, 20]]},
        {"label": "cat", "shape_type": "rectangle", "points": [[3, 3], [9, 9]]},
        {"label": "cat", "shape_type": "circle", "points": [[12, 12], [15, 12]]},
    ],
}
COCO = {
    "images": [{"id": 1, "file_name": "a.jpg", "height": 24, "width": 32}],
    "categories": [{"id": 3, "name": "cat"}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 3, "segmentation": [[1, 1, 20, 2, 10, 20]], "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 3, "segmentation": {"size": [24, 32], "counts": [100, 50, 618]}},
    ],
}
CONFIG = (
    b"model: {name: vat_resnet50.fss, overrides: {heads: 2}}\ndata: {name: synthetic}\ntraining: {steps: 3, lr: 5e-4}\n"
)


def _checkpoints(folder: Path) -> list[bytes]:
    tiny = small(backbone="test_resnet")
    vat.save(tiny, folder / "seed.safetensors", dtype=torch.float16)
    return [(folder / "seed.safetensors").read_bytes()]


def _fitted(folder: Path) -> list[bytes]:
    photo = np.zeros((32, 32, 3), np.uint8)
    mask = np.ones((32, 32), np.uint8)
    segmenter = vat.Segmenter(small(backbone="test_resnet").eval(), "cpu")
    segmenter.fit([photo], [mask]).save(folder / "fitted.safetensors")
    return [(folder / "fitted.safetensors").read_bytes()]


def _pickles() -> list[bytes]:
    stream = io.BytesIO()
    torch.save({"state_dict": {"module.head.weight": torch.zeros(3)}, "epoch": 3}, stream)
    return [stream.getvalue(), pickle.dumps({"state_dict": [1, 2]})]


EXPORTED = {
    "format": 1,
    "task": "segmentation",
    "image_size": 320,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "graphs": {"query": {"file": "query.onnx", "inputs": ["images"]}},
    "files": {"query.onnx": {"bytes": 100, "sha256": "00"}},
}


def _read_export(path: Path) -> Any:
    """The description of an exported model, and the first of its files."""
    folder = path.parent / "exported"
    folder.mkdir(exist_ok=True)
    (folder / "model.json").write_bytes(path.read_bytes())
    return ModelFolder.read(folder, "segmentation").graph_file("query")


def _mat() -> list[bytes]:
    stream = io.BytesIO()
    savemat(stream, {"kps": np.random.default_rng(0).random((10, 2)), "box_coord": np.array([[1, 20, 3, 30]])})
    compressed = io.BytesIO()
    savemat(compressed, {"kps": np.zeros((10, 2))}, do_compression=True)
    return [stream.getvalue(), compressed.getvalue()]


def readers(folder: Path) -> list[Reader]:
    """All of them; `folder` is for seeds that need files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jpg").write_bytes(_picture("JPEG"))
    pictures = _pictures()
    lists = [pickle.dumps({0: ["train2014/a.jpg", "val2014/b.jpg"], 1: []}), pickle.dumps([1, "x", (2, 3)])]

    def parsed(path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))

    def loaded(path: Path, use: Callable[[Any], Any]) -> Any:
        try:
            value = parsed(path)
        except (ValueError, RecursionError):
            return None  # not JSON any more: the readers below take parsed values
        return use(value)

    return [
        Reader("image", ".img", pictures, lambda p: read_image(p, max_pixels=MAX_PIXELS)),
        Reader("header", ".img", pictures, lambda p: image_size(p, max_pixels=MAX_PIXELS)),
        Reader("mask", ".png", pictures, lambda p: read_mask(p, max_pixels=MAX_PIXELS)),
        Reader("rle", ".json", [_json(RLE)], lambda p: loaded(p, from_rle)),
        Reader("polygons", ".json", [_json(POLYGONS)], lambda p: loaded(p, lambda v: from_polygons(v, (24, 32)))),
        Reader("labelme", ".json", [_json(LABELME)], lambda p: loaded(p, lambda v: from_labelme(v, (24, 32)))),
        Reader("any mask", ".json", [_json(LABELME), _json(RLE)], lambda p: read_any_mask(p, (24, 32))),
        Reader("supports", ".json", [_json(COCO), _json(LABELME)], read_supports),
        Reader("checkpoint", ".safetensors", _checkpoints(folder), vat.load),
        Reader("published", ".pt", _pickles(), vat.load),
        Reader("fitted", ".safetensors", _fitted(folder), vat.Segmenter.load),
        Reader("list", ".txt", [b"2007_000032__01\n2007_000039__20\n", b"abe's_flyingfish\n"], read_lines),
        Reader("pickled list", ".pkl", lists, read_plain_pickle),
        Reader("config", ".yaml", [CONFIG], load_experiment),
        Reader("matlab", ".mat", _mat(), lambda p: read_mat(p, "kps")),
        Reader("points", ".json", [b"[[1, 2], [3.5, 4]]", b'{"points": [[1, 2]]}'], _read_points),
        Reader("runtime", ".json", [_json(EXPORTED)], _read_export),
    ]
