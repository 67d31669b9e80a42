"""Episodes: pure functions of (seed, index) that follow the published protocols."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import data_fakes as fakes
from vat.data import EpisodeDataset, build, collate
from vat.errors import VatError


def episodes(*args: Any, **options: Any) -> EpisodeDataset:
    dataset = build(*args, **options)
    assert isinstance(dataset, EpisodeDataset)
    return dataset


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        same = torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        assert same, key


@pytest.fixture
def fss(tmp_path: Path) -> Path:
    return fakes.fss(tmp_path / "fss")


def test_sample_has_the_documented_shapes(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path)
    dataset = episodes("pascal", root, split="val", splits=tmp_path / "splits", shots=2, image_size=48)
    sample = dataset[3]
    assert {key: (tuple(value.shape), value.dtype) for key, value in sample.items() if torch.is_tensor(value)} == {
        "query": ((3, 48, 48), torch.uint8),
        "query_mask": ((48, 48), torch.uint8),
        "ignore": ((48, 48), torch.bool),
        "support": ((2, 3, 48, 48), torch.uint8),
        "support_mask": ((2, 48, 48), torch.uint8),
        "class_id": ((), torch.int64),
        "index": ((), torch.int64),
        "absent": ((), torch.bool),
        "query_size": ((2,), torch.int64),
    }
    assert sample["query_size"].tolist() == [60, 80]
    assert sample["query_mask"].unique().tolist() == [0, 1]
    assert sample["support_mask"].unique().tolist() == [0, 1]
    assert sample["ignore"].any()
    assert not (sample["ignore"] & sample["query_mask"].bool()).any()
    assert len(sample["support_names"].split("|")) == 2


@pytest.mark.parametrize("augment", ["none", "cats+pfenet", "strong"])
def test_samples_depend_on_seed_and_index_alone(fss: Path, augment: str) -> None:
    options = {"split": "train", "image_size": 40, "episodes": 6, "augment": augment}
    dataset = episodes("fss", fss, **options)
    alone = [dataset[i] for i in range(6)]
    torch.manual_seed(99)  # neither the global state nor the order of access matters
    state = torch.get_rng_state()
    for i in (5, 0, 3):
        assert_same(dataset[i], alone[i])
    assert torch.equal(torch.get_rng_state(), state)
    for workers, batch in ((0, 4), (2, 1), (2, 3)):
        loader = DataLoader(episodes("fss", fss, **options), batch_size=batch, num_workers=workers, collate_fn=collate)
        queries = torch.cat([part["query"] for part in loader])
        assert torch.equal(queries, torch.stack([sample["query"] for sample in alone]))
    other = episodes("fss", fss, seed=1, **options)
    assert any(not torch.equal(other[i]["query"], alone[i]["query"]) for i in range(6))


def test_training_never_runs_out_and_never_repeats_an_epoch(fss: Path) -> None:
    dataset = episodes("fss", fss, split="train", image_size=32)
    n = len(dataset)
    assert n == len(dataset.source.entries)
    first, second = ([dataset.plan(e * n + i) for i in range(n)] for e in (0, 10**6))
    assert [p.query for p in first] != [p.query for p in second]
    assert dataset[10**9]["index"] == 10**9
    with pytest.raises(IndexError):
        dataset[-1]


def test_fewer_shots_are_a_prefix_of_more(fss: Path) -> None:
    for split in ("train", "test"):
        one, three = (
            episodes(
                "fss",
                fss,
                split=split,
                shots=k,
                image_size=32,
                augment="none" if split == "test" else "strong",
            )
            for k in (1, 3)
        )
        for i in range(8):
            few, many = one.plan(i), three.plan(i)
            assert few.query == many.query
            assert few.supports == many.supports[:1]
            assert torch.equal(one[i]["support"], three[i]["support"][:1])
            assert len({many.query, *many.supports}) == 4


def test_pascal_tests_queries_in_list_order(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path)
    dataset = episodes("pascal", root, split="test", fold=1, splits=tmp_path / "splits", image_size=32)
    assert len(dataset) == 1000
    plans = [dataset.plan(k) for k in range(1000)]
    assert [p.query for p in plans] == [k % 15 for k in range(1000)]
    entries = dataset.source.entries
    assert all(entries[p.query][1] == entries[s][1] for p in plans for s in p.supports)
    assert len({p.supports for p in plans if p.query == 0}) == 2  # support drawn anew each round
    with pytest.raises(IndexError):
        dataset.plan(1000)


def test_coco_tests_draw_the_class_first(tmp_path: Path) -> None:
    root = fakes.coco(tmp_path, classes=(0, 4, 8), per_class=3)
    for n in range(3, 9):  # class 0 gets three times as many images
        fakes.save(fakes.photo(n), root / f"val2014/extra{n}.jpg")
    names = {c: [f"val2014/COCO_val2014_{c * 10 + n:012d}.jpg" for n in range(3)] for c in (0, 4, 8)}
    lists = {**names, 0: names[0] + [f"val2014/extra{n}.jpg" for n in range(3, 9)]}
    splits = fakes.coco_lists(tmp_path / "splits", "val", 0, lists)
    dataset = episodes("coco", root, split="test", splits=splits, image_size=32, cache_dir=tmp_path)
    assert len(dataset) == 1000
    drawn = np.bincount([dataset.plan(k).class_id for k in range(1000)], minlength=9)
    assert (drawn[[0, 4, 8]] > 270).all()  # a third each, whatever the number of images
    assert drawn.sum() == drawn[[0, 4, 8]].sum()


def test_fss_tests_every_image_once(fss: Path) -> None:
    dataset = episodes("fss", fss, split="test", image_size=32)
    assert sorted(dataset.plan(k).query for k in range(len(dataset))) == list(range(len(dataset.source.entries)))
    half = episodes("fss", fss, split="test", image_size=32, episodes=len(dataset) // 2)
    assert {half.plan(k).class_id for k in range(len(half))} == set(dataset.classes)  # evenly spaced
    assert len(list(half)) == len(half)


def test_class_balanced_training(tmp_path: Path) -> None:
    root = fakes.folder(tmp_path, classes="a", per_class=18)
    fakes.folder(root, classes="b", per_class=2)
    fakes.write(tmp_path / "splits/trn.txt", "a\nb")
    share = {}
    for balanced in (False, True):
        dataset = episodes("folder", root, split="train", splits=tmp_path / "splits", class_balanced=balanced)
        share[balanced] = np.mean([dataset.plan(i).class_id == 1 for i in range(600)])
    assert share[False] < 0.2
    assert 0.4 < share[True] < 0.6


def test_classes_with_too_few_images_are_left_out_and_noted(tmp_path: Path) -> None:
    root = fakes.folder(tmp_path, classes="ab", per_class=3)
    fakes.folder(root, classes="c", per_class=2)
    dataset = episodes("folder", root, split="all", shots=2)
    assert list(dataset.classes.values()) == ["a", "b"]
    assert dataset.notes == ["Class 'c' is left out: it has 2 images and needs 3."]
    with pytest.raises(VatError, match="No class has the 6 images"):
        episodes("folder", root, split="all", shots=5)


def test_memory_cache_changes_nothing_but_time(fss: Path) -> None:
    options = {"split": "train", "image_size": 40, "augment": "pfenet"}
    plain, cached = (episodes("fss", fss, cache=cache, **options) for cache in ("none", "memory"))
    expected = [plain[i] for i in range(6)]
    for _ in range(2):
        for i in range(6):
            assert_same(cached[i], expected[i])
    for path in fss.rglob("*.jpg"):
        path.unlink()
    for i in range(6):
        assert_same(cached[i], expected[i])


def test_data_sets_travel_to_spawned_workers(fss: Path) -> None:
    dataset = episodes("fss", fss, split="train", image_size=40, augment="strong", cache="memory")
    assert_same(pickle.loads(pickle.dumps(dataset))[3], dataset[3])


def test_memory_cache_is_shared_with_workers(fss: Path) -> None:
    dataset = episodes("fss", fss, split="test", image_size=40, cache="memory")
    loader = DataLoader(dataset, num_workers=2, collate_fn=collate, multiprocessing_context="fork")
    queries = torch.cat([batch["query"] for batch in loader])
    for path in fss.rglob("*.jpg"):
        path.unlink()
    assert torch.equal(torch.stack([sample["query"] for sample in dataset]), queries)


def test_masks_at_original_size_stay_a_list(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path)
    dataset = episodes("pascal", root, split="val", splits=tmp_path / "splits", image_size=32, original_size=True)
    batch = collate([dataset[0], dataset[1]])
    assert batch["query"].shape == (2, 3, 32, 32)
    assert isinstance(batch["query_mask_original"], list)
    assert torch.equal(batch["query_mask_original"][0], torch.from_numpy(fakes.box_mask(1)))
    assert batch["ignore_original"][1].sum() == 80
    assert isinstance(collate([dataset[0]])["query_mask_original"], list)  # whatever the batch size
    assert batch["query_name"] == [dataset[0]["query_name"], dataset[1]["query_name"]]
    with pytest.raises(VatError, match="original size"):
        build("pascal", root, split="train", splits=tmp_path / "splits", augment="cats", original_size=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shots": 0}, "shots is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"augment": "heavy"}, "no augmentation 'heavy'"),
        ({"cache": "disk"}, "no cache 'disk'"),
        ({"root": None}, "needs the folder"),
        ({"image_size": 100_000, "cache": "memory"}, "GiB are free"),
    ],
)
def test_wrong_options_get_a_sentence(fss: Path, options: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {"root": fss, "split": "train"} | options
    with pytest.raises(VatError, match=sentence):
        build("fss", **arguments)


def test_synthetic_data_is_built_by_name_alone() -> None:
    dataset: Dataset[dict[str, Any]] = build("synthetic", split="train", image_size=64, shots=2)
    assert dataset[0]["support"].shape == (2, 3, 64, 64)
    assert build("synthetic-pairs", split="train", image_size=64)[0]["target"].shape == (3, 64, 64)
