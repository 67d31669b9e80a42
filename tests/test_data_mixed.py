"""Several data sets as one, and photos against warped views of themselves."""

import pytest
import torch
import torch.nn.functional as F

from data_fakes import photo, save, voc
from vat.data import MixedDataset, build, transfer_points
from vat.data.synthetic import SyntheticEpisodes
from vat.data.warped import apply, random_projection, warped_flow
from vat.errors import VatError
from vat.training import build_network, load_experiment
from vat.training.feed import training_data, validation_data


def test_every_part_gets_its_share_and_samples_depend_on_their_number_alone():
    parts = [SyntheticEpisodes(image_size=32, seed=s) for s in (1, 2)]
    mixed = MixedDataset([(parts[0], 3.0), (parts[1], 1.0)], seed=0)
    drawn = [mixed.part_of(i) for i in range(2000)]
    assert 0.7 < drawn.count(0) / 2000 < 0.8
    i = drawn.index(1)
    assert torch.equal(mixed[i]["query"], parts[1][i]["query"])
    with pytest.raises(VatError, match="greater than 0"):
        MixedDataset([(parts[0], 0.0)], seed=0)


def test_an_experiment_may_train_on_several_sets_and_validate_on_another(tmp_path):
    root = voc(tmp_path, per_class=2)
    config = tmp_path / "mixed.yaml"
    config.write_text(
        "model: {name: vat_lite4_slim.mini}\n"
        "data:\n  name: mixed\n  image_size: 32\n"
        f"  root: {tmp_path}\n  splits: {tmp_path / 'splits'}\n"
        "  parts:\n    - {name: pascal, root: VOC2012, split: all}\n    - {name: synthetic, share: 0.5}\n"
        "training: {steps: 1}\nvalidation:\n  data: {name: synthetic}\n  episodes: 3\n"
    )
    experiment = load_experiment(config)
    train, val = training_data(experiment, 32, 0), validation_data(experiment, 32, 0)
    assert len(train.parts[0].classes) == 20
    assert len(train.parts[0].source.entries) == 80  # training and validation lists together
    assert len(val) == 3
    assert {k for s in (train[i] for i in range(4)) for k in s} == set(val[0])
    assert root.exists()
    assert build_network(experiment).config.image_size == 320


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data: {name: mixed}", "needs parts"),
        ("data: {name: pascal, parts: [{name: synthetic}]}", "belongs to data.name 'mixed'"),
        ("data: {name: mixed, parts: [{name: synthetic}]}", "name a data set as validation.data"),
    ],
)
def test_half_said_mixtures_are_refused(tmp_path, text, sentence):
    (tmp_path / "x.yaml").write_text(f"{text}\ntraining: {{steps: 1}}")
    with pytest.raises(VatError, match=sentence):
        load_experiment(tmp_path / "x.yaml")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for n in range(24):
        save(photo(n, (12, 16)).resize((160, 120)), root / f"{n}.jpg")
    return root


def test_the_flow_leads_from_the_target_to_the_same_spot_of_the_source(photos):
    """Warping the source by the flow gives the target, up to its colours: take the jitter out and compare."""
    data = build("warped", photos, split="train", image_size=128, grid=32, seed=3)
    data._jitter = lambda image: image
    for i in range(3):
        sample = data[i]
        flow = F.interpolate(sample["flow"][None], (128, 128), mode="bilinear") * 4
        axis = torch.arange(128) + 0.5
        at = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1) + flow[0].permute(1, 2, 0)
        warped = F.grid_sample(sample["source"][None].float(), at[None] / 64 - 1, align_corners=False)[0]
        inside = F.avg_pool2d(sample["valid"][None].float(), 3, 1, 1)[0] > 0.99
        mask = inside.repeat_interleave(4, 0).repeat_interleave(4, 1)
        error = (warped - sample["target"].float()).abs().mean(0)[mask].mean()
        shuffled = (sample["source"].float() - sample["target"].float()).abs().mean(0)[mask].mean()
        assert error < 0.5 * shuffled


def test_key_points_follow_the_flow(photos):
    sample = build("warped", photos, split="train", image_size=128, grid=32, seed=1)[7]
    n = int(sample["n_points"])
    moved = transfer_points(sample["flow"][None], sample["target_kps"][None], 128)[0, :n]
    assert (moved - sample["source_kps"][:n]).norm(dim=-1).median() < 3
    again = build("warped", photos, split="train", image_size=128, grid=32, seed=1)[7]
    assert torch.equal(sample["target"], again["target"])


def test_photos_kept_from_training_are_others(photos):
    train, test = (build("warped", photos, split=s, image_size=64) for s in ("train", "test"))
    assert len(train) + len(test) == 24
    assert not set(train.source.paths) & set(test.source.paths)
    with pytest.raises(IndexError):
        test[len(test)]


def test_identity_warps_have_no_flow():
    flow, valid = warped_flow(torch.eye(3), torch.zeros(1, 2, 5, 5), torch.eye(3), 16)
    assert float(flow.abs().max()) < 1e-5
    assert valid.all()


def test_a_projection_and_its_inverse_cancel():
    import numpy as np

    projection = random_projection(np.random.default_rng(0))
    points = torch.rand(50, 2) * 2 - 1
    torch.testing.assert_close(
        apply(torch.linalg.inv(projection), apply(projection, points)), points, atol=1e-4, rtol=0
    )
