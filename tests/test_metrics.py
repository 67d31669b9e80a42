"""Metrics: agreement with published implementations, and independence of order, batches and processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vat.errors import VatError
from vat.metrics import (
    PCK,
    FewShotIoU,
    MaskTransfer,
    MeanBoundaryAccuracy,
    boundary_accuracy,
    boundary_radii,
    boundary_region,
    pck_per_pair,
)
from vat.metrics.boundary import ellipse_element

GOLDEN = Path(__file__).parent / "golden"


def golden_arrays() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "metrics.npz"))


def expected() -> dict[str, Any]:
    return json.loads((GOLDEN / "metrics.json").read_text())


def masks(name: str) -> Tensor:
    return torch.from_numpy(np.unpackbits(golden_arrays()[name], axis=-1))


def episodes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """pred, target, class_id, ignore of 40 golden episodes of 64 px."""
    return masks("pred"), masks("gt"), torch.from_numpy(golden_arrays()["cls"]), masks("ignore").bool()


def keypoints() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """pred [20, 40, 2], target, n_points, threshold of 20 golden pairs."""
    arrays = golden_arrays()
    pred, target = (torch.from_numpy(arrays[name]).transpose(1, 2) for name in ("prd_kps", "tgt_kps"))
    return pred, target, torch.from_numpy(arrays["n_pts"]), torch.from_numpy(arrays["pck_threshold"])


@pytest.mark.parametrize("suffix", ["", "_ignore"])
def test_iou_agrees_with_published_code(suffix: str) -> None:
    pred, target, class_id, ignore = episodes()
    metric = FewShotIoU(range(5))
    metric.update(pred, target, class_id, ignore if suffix else None)
    result = metric.compute()
    for name in ("miou", "fb_iou"):
        assert float(result[name]) == pytest.approx(expected()["iou"][name + suffix], abs=1e-4)
    assert np.mean(list(result["per_class"].values())) == pytest.approx(float(result["miou"]), abs=1e-4)


def test_iou_sums_over_episodes_before_dividing() -> None:
    target = torch.zeros(2, 1, 10, dtype=torch.uint8)
    target[0, 0, :9] = 1
    target[1, 0, :1] = 1
    pred = torch.zeros_like(target)
    pred[0] = target[0]
    metric = FewShotIoU([7])
    metric.update(pred, target, torch.tensor([7, 7]))
    assert float(metric.compute()["miou"]) == pytest.approx(90.0)  # the mean of the episodes would be 50


def test_unseen_classes_are_nan_and_leave_miou_alone_unless_told() -> None:
    pred, target, class_id, _ = episodes()
    wide, strict = FewShotIoU(range(10)), FewShotIoU(range(10), count_unseen=True)
    for metric in (wide, strict):
        metric.update(pred, target, class_id)
    assert math.isnan(wide.compute()["per_class"][9])
    assert float(wide.compute()["miou"]) == pytest.approx(2 * float(strict.compute()["miou"]))


def test_class_ids_need_not_be_contiguous() -> None:
    pred, target, class_id, _ = episodes()
    metric = FewShotIoU([100, 2, 50, 11, 3])
    metric.update(pred, target, torch.tensor([2, 3, 11, 50, 100])[class_id])
    assert float(metric.compute()["miou"]) == pytest.approx(expected()["iou"]["miou"], abs=1e-4)
    with pytest.raises(VatError, match="Class 4 "):
        metric.update(pred, target, torch.full((40,), 4))


def test_shapes_are_not_broadcast() -> None:
    mask = torch.ones(2, 8, 8)
    for metric in (MeanBoundaryAccuracy(), MaskTransfer()):
        with pytest.raises(VatError, match="one size"):
            metric.update(mask, mask[:1])
    with pytest.raises(VatError, match="one size"):
        FewShotIoU([0]).update(mask, mask[:1], torch.zeros(2, dtype=torch.int64))


def test_boundary_accuracy_agrees_with_published_code() -> None:
    arrays, metric = golden_arrays(), MeanBoundaryAccuracy(min_radius=1)
    truths = expected()["mba_min_radius_1"]
    for index, (_, width) in enumerate(expected()["mba_sizes"]):
        pred, target = (
            torch.from_numpy(np.unpackbits(arrays[f"mba_{kind}_{index}"], axis=-1)[None, :, :width])
            for kind in ("pred", "gt")
        )
        assert float(boundary_accuracy(pred, target, 1)) == pytest.approx(truths[index], abs=1e-6)
        metric.update(pred, target)
    assert float(metric.compute()) == pytest.approx(100 * np.mean(truths), abs=1e-4)


def test_radii_truncate_towards_zero() -> None:
    assert boundary_radii(473, 473, min_radius=3) == [3, 3, 3, 3, 3]
    assert boundary_radii(64, 64, min_radius=3) == [3, 3, 2, 2, 1]
    assert boundary_radii(1500, 1500, min_radius=1) == [1, 2, 4, 6, 8]
    with pytest.raises(VatError, match="min_radius"):
        boundary_radii(64, 64, min_radius=0)


def test_structuring_element_is_opencvs_ellipse() -> None:
    rows = ["0001000", "0111110", "1111111", "1111111", "1111111", "0111110", "0001000"]
    assert ellipse_element(3).int().tolist() == [[int(cell) for cell in row] for row in rows]


def test_image_frame_is_not_a_boundary() -> None:
    mask = torch.zeros(1, 20, 20)
    mask[:, :, :10] = 1
    region = boundary_region(mask, 2)
    assert region[0].any(0).nonzero().flatten().tolist() == [8, 9, 10, 11]
    metric = MeanBoundaryAccuracy()
    metric.update(mask, torch.ones_like(mask))
    assert metric.compute().isnan()
    metric.update(mask, mask)
    assert float(metric.compute()) == 100.0  # the image without boundary was left out


@pytest.mark.parametrize("alpha", [0.03, 0.05, 0.1, 0.15])
def test_pck_agrees_with_published_code(alpha: float) -> None:
    truth = expected()["pck"][str(alpha)]
    per_pair = 100 * pck_per_pair(*keypoints(), [alpha])[:, 0]
    np.testing.assert_allclose(per_pair, truth["per_pair"], atol=1e-4)
    metric = PCK()
    metric.update(*keypoints())
    assert metric.compute()["overall"][alpha] == pytest.approx(truth["mean"], abs=1e-4)


def test_pck_by_class_and_difficulty() -> None:
    pred, target, n_points, threshold = keypoints()
    class_id = torch.arange(20) % 3
    level = torch.arange(20) % 4 - 1
    metric = PCK(alphas=[0.1], classes=range(3))
    metric.update(pred, target, n_points, threshold, class_id, {"viewpoint": level, "occlusion": level})
    result = metric.compute()
    per_pair = np.array(expected()["pck"]["0.1"]["per_pair"])
    for name, groups in (("per_class", class_id), ("viewpoint", level)):
        for group in range(3):
            assert result[name][group][0.1] == pytest.approx(per_pair[groups == group].mean(), abs=1e-4)
    assert math.isnan(result["occlusion"][3][0.1])
    assert math.isnan(result["scale"][0][0.1])


def test_pck_leaves_out_pairs_without_points() -> None:
    metric = PCK(alphas=[0.1])
    points = torch.zeros(2, 40, 2)
    metric.update(points, points, torch.tensor([0, 3]), torch.tensor([100.0, 100.0]))
    assert metric.compute()["overall"][0.1] == 100.0
    levels = torch.tensor([3, 3])
    with pytest.raises(VatError, match="Level 3 of viewpoint"):
        metric.update(points, points, levels, torch.ones(2), difficulty={"viewpoint": levels})


def test_mask_transfer_counts_pixels_and_foreground() -> None:
    target = torch.zeros(1, 10, 10)
    target[:, :5] = 1
    transferred = torch.zeros_like(target)
    transferred[:, 1:6] = 1
    metric = MaskTransfer()
    metric.update(transferred, target)
    result = metric.compute()
    assert float(result["lt_acc"]) == pytest.approx(80.0)
    assert float(result["iou"]) == pytest.approx(100 * 4 / 6)


def run_all(rows: Tensor, batch: int) -> dict[str, float]:
    """Every metric over the given golden episodes, in batches; a flat summary."""
    pred, target, class_id, ignore = episodes()
    points = keypoints()
    iou, mba, pck, transfer = FewShotIoU(range(5)), MeanBoundaryAccuracy(), PCK(), MaskTransfer()
    for part in rows.split(batch):
        iou.update(pred[part], target[part], class_id[part], ignore[part])
        mba.update(pred[part], target[part])
        transfer.update(pred[part], target[part])
        pairs = part[part < 20]
        pck.update(*(value[pairs] for value in points))
    overall = {f"pck@{alpha}": value for alpha, value in pck.compute()["overall"].items()}
    scores = {"miou": iou.compute()["miou"], "fb": iou.compute()["fb_iou"], "mba": mba.compute()}
    return {name: float(value) for name, value in (scores | transfer.compute() | overall).items()}


def test_order_and_batch_size_do_not_matter() -> None:
    straight = run_all(torch.arange(40), batch=40)
    shuffled = run_all(torch.randperm(40, generator=torch.Generator().manual_seed(0)), batch=7)
    assert shuffled == pytest.approx(straight, rel=1e-5)


def test_states_merge() -> None:
    pred, target, class_id, _ = episodes()
    first, second = FewShotIoU(range(5)), FewShotIoU(range(5))
    first.update(pred[:13], target[:13], class_id[:13])
    second.update(pred[13:], target[13:], class_id[13:])
    first.merge_state(second)
    assert float(first.compute()["miou"]) == pytest.approx(expected()["iou"]["miou"], abs=1e-4)


def score_share(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    Path(folder, f"{rank}.json").write_text(json.dumps(run_all(torch.arange(rank, 40, 2), batch=8)))
    torch.distributed.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    alone = run_all(torch.arange(40), batch=8)
    other = torch.multiprocessing.get_context("spawn").Process(target=score_share, args=(1, str(tmp_path)))
    other.start()
    score_share(0, str(tmp_path))
    other.join()
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == pytest.approx(alone, rel=1e-5)


@pytest.mark.gpu
def test_metrics_run_on_cuda() -> None:
    pred, target, class_id, ignore = (value.cuda() for value in episodes())
    iou, mba, pck = FewShotIoU(range(5)).cuda(), MeanBoundaryAccuracy(1).cuda(), PCK().cuda()
    iou.update(pred, target, class_id, ignore)
    mba.update(pred, target)
    pck.update(*(value.cuda() for value in keypoints()))
    assert float(iou.compute()["miou"]) == pytest.approx(expected()["iou"]["miou_ignore"], abs=1e-4)
    assert float(mba.compute()) == pytest.approx(100 * float(boundary_accuracy(pred, target, 1).nanmean()), abs=1e-3)
    assert pck.compute()["overall"][0.1] == pytest.approx(expected()["pck"]["0.1"]["mean"], abs=1e-4)
