"""The compact backbone and how it learns from a large one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from data_fakes import photo, save
from vat.cli import app
from vat.distill.matching import FeatureMatching, pair_maps
from vat.distill.photos import find_photos, random_views, recolour
from vat.distill.settings import load_settings
from vat.errors import VatError
from vat.features import Backbone
from vat.features.slim import KEPT, TEACHER, from_teacher

CONFIGS = Path(__file__).parent.parent / "configs" / "distill"


@pytest.fixture(scope="module")
def teacher():
    torch.manual_seed(0)
    return Backbone(TEACHER)


def test_the_slim_backbone_is_the_teacher_without_some_blocks(teacher):
    slim = Backbone("lite4_slim")
    slim.body.load_state_dict(from_teacher(teacher.body.state_dict()))
    kept = sum(p.numel() for p in slim.parameters())
    assert 5.0e6 < kept < 6.0e6
    images = torch.rand(1, 3, 64, 64)
    ours, theirs = slim.every_map(images), teacher.every_map(images)
    torch.testing.assert_close(ours[0], theirs[0])  # up to the first missing block both compute the same
    assert {level: set(c) for level, c in slim.channels.items()} == {
        level: set(c) for level, c in teacher.channels.items()
    }


def test_weights_of_something_else_are_refused():
    with pytest.raises(VatError, match="not the weights of tf_efficientnet_lite4"):
        from_teacher({"blocks.0.0.conv.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("steps=0", "steps is 0; it must be at least 1"),
        ("minutes=null", "has no end"),
        ("lr=0", "lr is 0.0; it must be greater than 0"),
        ("sizes=[224, 16]", r"sizes is \[224, 16\]; it must be at least 32"),
        ("sizes=[]", "sizes is empty"),
        ("crop_area=[0.5, 0.2]", "from the least to the largest share"),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(VatError, match=words):
        load_settings(CONFIGS / "lite4_slim.yaml", [change])


def test_every_map_has_a_teacher_and_the_last_of_each_stage_meet(teacher):
    pairs = dict(pair_maps(Backbone("lite4_slim").channels, teacher.channels))
    assert len(pairs) == sum(len(stage) for stage in KEPT[1:])  # stride 2 is no level
    assert pairs[3, 2] == (3, 3)
    assert pairs[4, 3] == (4, 5)
    assert pairs[4, 7] == (4, 11)
    assert pairs[5, 3] == (5, 8)
    for (level, _), (other, _) in pairs.items():
        assert level == other


def test_a_student_of_other_widths_is_compared_through_projections(teacher):
    student = Backbone("tf_efficientnet_lite0", frozen=False)
    matching = FeatureMatching(student, teacher)
    images = torch.rand(2, 3, 64, 64)
    loss, cosines = matching(student(images), teacher(images))
    loss.backward()
    assert matching.projections
    assert len(cosines) == len(matching.pairs)
    assert student.body.conv_stem.weight.grad.abs().sum() > 0


def test_the_teacher_is_at_distance_zero_from_itself(teacher):
    matching = FeatureMatching(teacher, teacher)
    maps = teacher(torch.rand(1, 3, 64, 64))
    loss, cosines = matching(maps, maps)
    assert float(loss) == pytest.approx(0, abs=1e-5)
    assert torch.allclose(cosines, torch.ones_like(cosines), atol=1e-5)


def test_views_depend_on_the_generator_alone_and_stay_in_range():
    photos = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    first, again = (random_views(photos, 32, (0.2, 1.0), 0.4, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (3, 3, 32, 32)
    assert float(first.min()) >= 0
    assert float(first.max()) <= 1
    one = torch.ones(3)
    torch.testing.assert_close(recolour(first, one, one, one), first)
    gray = recolour(first, one, one, 0 * one)
    torch.testing.assert_close(gray[:, 0], gray[:, 2])


def test_photos_are_found_and_masks_are_not(tmp_path):
    save(photo(0), tmp_path / "a/1.jpg")
    save(photo(0), tmp_path / "a/1.png")  # beside a photo: its mask
    save(photo(0), tmp_path / "b/2.png")
    save(photo(0), tmp_path / "VOC/SegmentationClassAug/3.png")
    assert [p.name for p in find_photos([tmp_path])] == ["1.jpg", "2.png"]
    with pytest.raises(VatError, match="No photo"):
        find_photos([tmp_path / "VOC"])


def test_the_command_distils_resumes_and_says_how_far_it_came(tmp_path, teacher):
    for n in range(6):
        save(photo(n), tmp_path / "photos" / f"{n}.jpg")
    (tmp_path / "photos/broken.jpg").write_bytes(b"no image")
    save_file(teacher.body.state_dict(), tmp_path / "teacher.safetensors")
    config = tmp_path / "d.yaml"
    config.write_text(
        "distill: {batch_size: 2, steps: 2, minutes: null, sizes: [32], photo_size: 64, held_out: 3, workers: 0}"
    )
    arguments = ["distill", str(config), "--photos", str(tmp_path / "photos"), "--out", str(tmp_path / "run")]
    arguments += ["--teacher-weights", str(tmp_path / "teacher.safetensors"), "--accelerator", "cpu"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    weights = load_file(tmp_path / "run/backbone.safetensors")
    Backbone("lite4_slim").load_weights(tmp_path / "run/backbone.safetensors")
    history = json.loads((tmp_path / "run/summary.json").read_text())["history"]
    assert [point["step"] for point in history] == [0, 2]
    with pytest.raises(VatError, match="already holds"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    with pytest.raises(VatError, match=r"other settings \(lr\)"):
        CliRunner().invoke(app, [*arguments, "--resume", "--set", "lr=1"], catch_exceptions=False)
    CliRunner().invoke(app, [*arguments, "--resume", "--set", "steps=3"], catch_exceptions=False)
    more = load_file(tmp_path / "run/backbone.safetensors")
    assert any(not torch.equal(more[k], weights[k]) for k in weights)
