"""Built-in examples, rendered when they are asked for: nothing to upload, nothing to download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from vat.data.synthetic import Scene, class_recipe, compose
from vat.data.synthetic.noise import stream
from vat.images import encoded
from vat.web.photos import Photo
from vat.web.session import Session

SIDE = 448
EXAMPLES, QUERIES = 2, 8
SAMPLE_STREAM = 0x5EED


@dataclass(frozen=True)
class Sample:
    """Classes out of the test split of the synthetic world: name -> class id."""

    title: str
    classes: dict[str, int]
    seed: int


SAMPLES = (
    Sample("Butterflies", {"butterfly": 5}, 3),
    Sample("Toy cars", {"car": 14}, 1),
    Sample("Birds and fish", {"bird": 15, "fish": 6}, 8),
)
PAIRS = (
    Sample("Two animals", {"animal": 10}, 2),
    Sample("Two cars", {"car": 14}, 2),
    Sample("Turned butterflies (hard)", {"butterfly": 3}, 21),
)
"""The first two are chosen because they work well, the last one because it does not."""


def scenes(sample: Sample, count: int, span: tuple[float, float]) -> list[Scene]:
    """Pictures that each show all classes of a sample; the same ones every time."""
    first, *others = (class_recipe(id) for id in sample.classes.values())
    return [
        compose(stream(SAMPLE_STREAM, sample.seed, picture), first, others, SIDE, span=span) for picture in range(count)
    ]


def picture(scene: Scene) -> Image.Image:
    return Image.fromarray(scene.image.transpose(1, 2, 0))


def labels(scene: Scene, sample: Sample) -> np.ndarray:
    """The label map of a scene: the i-th class of the sample has number i."""
    order = list(sample.classes.values())
    ids = [instance.recipe.class_id for instance in scene.instances]
    numbers = [0, *(order.index(id) + 1 if id in order else 0 for id in ids)]
    return np.asarray(numbers, np.uint8)[scene.owner + 1]


def fill(session: Session, sample: Sample) -> None:
    """In place of all that is there: two painted examples, and photos to mask."""
    session.reset()
    session.classes = list(sample.classes)
    shown = scenes(sample, EXAMPLES + QUERIES, (0.4, 0.75))
    session.add_examples(encoded(picture(scene), "PNG") for scene in shown[:EXAMPLES])
    session.add_queries(encoded(picture(scene), "PNG") for scene in shown[EXAMPLES:])
    for photo, scene in zip(session.examples.values(), shown, strict=False):
        photo.given = labels(scene, sample)


def pair(sample: Sample) -> tuple[Photo, Photo]:
    """Two photos of one class, to be matched."""
    first, second = (encoded(picture(scene), "PNG") for scene in scenes(sample, 2, (0.7, 0.95)))
    return Photo.read(first, "first", SIDE**2), Photo.read(second, "second", SIDE**2)
