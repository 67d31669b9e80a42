"""Tiny data sets in the layouts people have on disk, drawn on the fly for the tests."""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from vat.data.coco import COCO_CLASSES

SIDE = (60, 80)  # height, width
BOX = (slice(10, 50), slice(20, 75))  # 2,200 px: large enough to be listed when lists are derived


def photo(seed: int, size: tuple[int, int] = SIDE) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def box_mask(value: int = 255, size: tuple[int, int] = SIDE) -> np.ndarray:
    mask = np.zeros(size, np.uint8)
    mask[BOX] = value
    return mask


def save(image: Image.Image | np.ndarray, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(path)
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def voc(root: Path, per_class: int = 3, classes: Iterable[int] = range(1, 21)) -> Path:
    """VOC2012 with `per_class` images of each class, a void border, and lists under `root/splits`."""
    lists: dict[str, list[str]] = {}
    for class_id in classes:
        for n in range(per_class):
            for part in ("trn", "val"):
                name = f"{part}_{class_id:02d}_{n}"
                labels = box_mask(class_id)
                labels[BOX[0], 18:20] = 255
                save(photo(class_id * 100 + n), root / "VOC2012/JPEGImages" / f"{name}.jpg")
                palette = Image.fromarray(labels).convert("P")
                palette.putdata(labels.ravel().tolist())
                save(palette, root / "VOC2012/SegmentationClassAug" / f"{name}.png")
                lists.setdefault(f"{part}/fold{(class_id - 1) // 5}.txt", []).append(f"{name}__{class_id:02d}")
    for name, lines in lists.items():
        write(root / "splits/pascal" / name, "\n".join(lines) + "\n")
    return root / "VOC2012"


def coco(root: Path, per_class: int = 3, classes: Iterable[int] = range(8), png: bool = False) -> Path:
    """COCO2014 with boxes as polygons (or class-id PNGs); categories have gaps in their ids, as COCO's do."""
    folder = root / "COCO2014"
    category_ids = [3 * index + 1 for index in range(80)]
    for part in ("train2014", "val2014"):
        images, annotations = [], []
        for class_id in classes:
            for n in range(per_class):
                image_id = class_id * 10 + n
                name = f"COCO_{part}_{image_id:012d}"
                save(photo(image_id), folder / part / f"{name}.jpg")
                images.append({"id": image_id, "file_name": f"{name}.jpg", "height": SIDE[0], "width": SIDE[1]})
                for left, right in ((20, 50), (50, 75)):  # two objects make one class mask
                    polygon = [left, 10, right, 10, right, 50, left, 50]
                    annotations.append(
                        {
                            "image_id": image_id,
                            "category_id": category_ids[class_id],
                            "segmentation": [polygon],
                        }
                    )
                if png:
                    save(box_mask(class_id + 1), folder / "annotations" / part / f"{name}.png")
        categories = [{"id": i, "name": name} for i, name in zip(category_ids, COCO_CLASSES, strict=True)]
        if not png:
            instances = {"images": images, "annotations": annotations, "categories": categories[::-1]}
            write(folder / f"annotations/instances_{part}.json", json.dumps(instances))
    return folder


def coco_lists(root: Path, part: str, fold: int, lists: object) -> Path:
    path = root / f"coco/{part}/fold{fold}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(lists))
    return root


def fss(root: Path, classes: Iterable[str] = "abcdefgh", per_class: int = 4) -> Path:
    for number, name in enumerate(classes):
        for n in range(1, per_class + 1):
            save(photo(number * 100 + n), root / name / f"{n}.jpg")
            save(np.repeat(box_mask(200)[..., None], 3, axis=-1), root / name / f"{n}.png")
    return root


def folder(root: Path, classes: Iterable[str] = "abc", per_class: int = 3, value: int = 1) -> Path:
    for number, name in enumerate(classes):
        for n in range(per_class):
            save(photo(number * 100 + n), root / name / "images" / f"im{n}.jpg")
            save(box_mask(value), root / name / "masks" / f"im{n}.png")
    return root


TARGET_POINTS = [[20.0, 10.0], [74.0, 10.0], [40.0, 30.0]]
SOURCE_POINTS = [[10.0, 5.0], [60.0, 8.0], [30.0, 59.0]]


def spair(root: Path, pairs: int = 3, **changes: object) -> Path:
    for part in ("trn", "val", "test"):
        names = [f"{n:06d}-im{n}-im{n + 1}:cat" for n in range(pairs)]
        write(root / f"Layout/large/{part}.txt", "\n".join(names))
        for n, name in enumerate(names):
            annotation = {
                "src_imname": f"im{n}.jpg",
                "trg_imname": f"im{n + 1}.jpg",
                "category": "cat",
                "src_kps": SOURCE_POINTS,
                "trg_kps": TARGET_POINTS,
                "src_bndbox": [10, 5, 70, 35],
                "trg_bndbox": [0, 0, 79, 59],
                "viewpoint_variation": 1,
                "scale_variation": 2,
                "truncation": 0,
                "occlusion": 3,
            }
            write(root / "PairAnnotation" / part / f"{name}.json", json.dumps(annotation | changes))
    for n in range(pairs + 1):
        save(photo(n), root / f"JPEGImages/cat/im{n}.jpg")
    return root


def pfpascal(root: Path, flips: tuple[int, ...] = (0, 1)) -> Path:
    hidden = float("nan")
    for stem, points in (("one", TARGET_POINTS), ("two", SOURCE_POINTS)):
        save(photo(len(stem)), root / f"JPEGImages/{stem}.jpg")
        kps = np.array([*points, [hidden, hidden] if stem == "one" else [1.0, 1.0]])
        (root / "Annotations/bicycle").mkdir(parents=True, exist_ok=True)
        savemat(root / f"Annotations/bicycle/{stem}.mat", {"kps": kps, "bbox": [[0, 0, 79, 59]]})
    prefix = "PF-dataset-PASCAL/JPEGImages"
    lines = [f"{prefix}/two.jpg,{prefix}/one.jpg,2" for _ in flips]
    header = "source_image,target_image,class"
    for part in ("val", "test"):
        write(root / f"{part}_pairs.csv", "\n".join([header, *lines]))
    flipped = [f"{line},{flip}" for line, flip in zip(lines, flips, strict=True)]
    write(root / "trn_pairs.csv", "\n".join([f"{header},flip", *flipped]))
    return root


def pfwillow(root: Path) -> Path:
    save(photo(1), root / "car(S)/a.png")
    save(photo(2), root / "car(S)/b.png")
    source = [*range(10, 20), *range(20, 40, 2)]  # x, then y
    target = [*range(40, 50), *range(0, 50, 5)]
    header = [
        "imageA",
        "imageB",
        *(f"{axis}{image}{n}" for image in "AB" for axis in "XY" for n in range(1, 11)),
    ]
    row = ["PF-dataset/car(S)/a.png", "PF-dataset/car(S)/b.png", *map(str, source + target)]
    write(root / "test_pairs.csv", ",".join(header) + "\n" + ",".join(row))
    return root


def caltech(root: Path, per_class: int = 3) -> Path:
    for category, annotations in (("airplanes", "Airplanes_Side_2"), ("ant", "ant")):
        for n in range(1, per_class + 1):
            save(photo(n), root / f"101_ObjectCategories/{category}/image_{n:04d}.jpg")
            target = root / f"Annotations/{annotations}/annotation_{n:04d}.mat"
            target.parent.mkdir(parents=True, exist_ok=True)
            contour = np.array([[0, 54, 54, 0], [0, 0, 39, 39]])  # x, y from the corner of the box
            savemat(target, {"box_coord": [[11, 50, 21, 75]], "obj_contour": contour})
    return root
