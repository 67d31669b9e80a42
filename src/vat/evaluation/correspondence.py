"""Semantic correspondence: PCK of key points, and masks carried over (Caltech-101)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.data import transfer_points
from vat.errors import VatError
from vat.evaluation.protocol import Batch, Protocol, Record, identity, or_none, percent
from vat.evaluation.tables import PlainTable, number
from vat.metrics import DIFFICULTY_LEVELS, PCK, mask_agreement, pck_per_pair

SHOWN_ALPHA = 0.1
"""The alpha that papers quote when they quote one."""


@dataclass(frozen=True)
class Correspondence(Protocol):
    """`alphas` of PCK; `flip` averages the flow with that of the mirrored pair."""

    alphas: tuple[float, ...] = (0.03, 0.05, 0.1, 0.15)
    flip: bool = False

    task = "correspondence"
    unit = "pairs"

    def __post_init__(self) -> None:
        usable = all(0 < alpha < math.inf for alpha in self.alphas)
        if not self.alphas or not usable or len(set(self.alphas)) < len(self.alphas):
            raise VatError(f"alphas is {list(self.alphas)}; give different numbers above 0, such as 0.05,0.1.")

    def check(self, sample: dict[str, Any]) -> None:
        if "target" not in sample:
            raise VatError("This model is for correspondence, but the data set holds episodes of segmentation.")

    def predict(self, model: Any, batch: Batch) -> Tensor:
        """Flow [B, 2, g, g] from target to source, in cells."""
        target, source = model.normalize(batch["target"]), model.normalize(batch["source"])
        flow = model(target, source).float()
        if self.flip:
            mirrored = model(target.flip(-1), source.flip(-1)).float().flip(-1)
            flow = (flow + mirrored * mirrored.new_tensor([-1.0, 1.0]).view(2, 1, 1)) / 2
        return flow

    def measure(self, prediction: Tensor, batch: Batch) -> list[Record]:
        records = identity(batch, ("target_name", "source_name"))
        moved = transfer_points(prediction, batch["target_kps"], batch["target"].shape[-1])
        shares = pck_per_pair(
            moved, batch["source_kps"], batch["n_points"], batch["pck_threshold"].float(), self.alphas
        )
        levels = {name: level.tolist() for name, level in batch["levels"].items()}
        for i, (record, share) in enumerate(zip(records, shares.double().tolist(), strict=True)):
            record["pck"] = None if any(map(math.isnan, share)) else share
            record["levels"] = {name: level[i] for name, level in levels.items()}
        if "target_mask" in batch:
            carried = carry_mask(prediction, batch["source_mask"])
            accuracy, iou = (values.double().tolist() for values in mask_agreement(carried, batch["target_mask"]))
            for i, record in enumerate(records):
                record["transfer"] = {"lt_acc": accuracy[i], "iou": iou[i]}
        return records

    def results(self, records: Sequence[Record], classes: dict[int, str]) -> dict[str, Any]:
        """`pck` by alpha (as text, for JSON), `per_class`, `difficulty`; `transfer` where there are masks."""
        results: dict[str, Any] = {}
        pointed = [record for record in records if record["pck"] is not None]
        if pointed:
            found = self._pck(pointed)
            results["pck"] = _by_alpha(found["overall"])
            results["per_class"] = {
                classes.get(c, str(c)): _by_alpha(values) for c, values in found["per_class"].items()
            }
            by_level = {name: {str(n): _by_alpha(v) for n, v in found[name].items()} for name in DIFFICULTY_LEVELS}
            results["difficulty"] = {
                name: {n: v for n, v in levels.items() if v[str(self.alphas[0])] is not None}
                for name, levels in by_level.items()
            }
        masked = [record["transfer"] for record in records if "transfer" in record]
        if masked:
            results["transfer"] = {name: percent(entry[name] for entry in masked) for name in ("lt_acc", "iou")}
        return results

    def _pck(self, records: Sequence[Record]) -> dict[str, Any]:
        class_ids = [record["class_id"] for record in records]
        metric = RecordedPCK(self.alphas, class_ids, sync_on_compute=False).set_dtype(torch.float64)
        difficulty = {name: torch.tensor([r["levels"][name] for r in records]) for name in DIFFICULTY_LEVELS}
        shares = torch.tensor([record["pck"] for record in records], dtype=torch.float64)
        metric.update(shares, torch.tensor(class_ids), difficulty)
        return metric.compute()

    def headline(self, records: Sequence[Record]) -> str:
        results = self.results(records, {})
        if "pck" in results:
            return "PCK " + ", ".join(f"{number(value)} (@{alpha})" for alpha, value in results["pck"].items())
        if "transfer" in results:
            return "LT-ACC {lt_acc:.1f}, IoU {iou:.1f}".format(**results["transfer"])
        return "no key points so far"

    def quality(self, record: Record) -> float:
        """The share of correct points at the alpha nearest to 0.1, or the IoU of the carried mask."""
        if record["pck"] is None:
            return record["transfer"]["iou"] if "transfer" in record else 0.0
        return record["pck"][self.alphas.index(self.shown_alpha)]

    @property
    def shown_alpha(self) -> float:
        return min(self.alphas, key=lambda alpha: abs(alpha - SHOWN_ALPHA))

    def tables(self, results: dict[str, Any]) -> list[PlainTable]:
        tables = []
        alphas = [str(alpha) for alpha in self.alphas]
        columns = [f"PCK@{alpha}" for alpha in alphas]
        if "pck" in results:
            row = [number(results["pck"][alpha]) for alpha in alphas]
            tables.append(PlainTable("Results in percent", ["", *columns], [["all pairs", *row]]))
        elif "transfer" not in results:
            tables.append(PlainTable("Results in percent", ["", *columns], [["no key points", *("-" for _ in alphas)]]))
        if "transfer" in results:
            row = [number(results["transfer"][name]) for name in ("lt_acc", "iou")]
            tables.append(PlainTable("Mask transfer in percent", ["", "LT-ACC", "IoU"], [["all pairs", *row]]))
        if "pck" in results:
            groups = {"class": results["per_class"], **results["difficulty"]}
            for name, group in groups.items():
                if group:
                    rows = [[key, *(number(values[alpha]) for alpha in alphas)] for key, values in group.items()]
                    tables.append(PlainTable(f"PCK by {name}", [name, *columns], rows))
        return tables


class RecordedPCK(PCK):
    """`PCK` from the shares of correct points of pairs, [N, A], where the points are gone."""

    def update(self, share: Tensor, class_id: Tensor, difficulty: dict[str, Tensor]) -> None:  # type: ignore[override]
        self._add("all", share, torch.zeros_like(class_id))
        self._add("class", share, torch.searchsorted(self._class_ids, class_id))
        for name, level in difficulty.items():
            self._add(name, share, level)


def carry_mask(flow: Tensor, source_mask: Tensor) -> Tensor:
    """The source masks [B, H, W] seen from the target: each target pixel takes the value at the nearest pixel
    that the flow [B, 2, g, g] (in cells, target to source) leads it to, and 0 outside of the source.
    """
    height, width = source_mask.shape[-2:]
    full = F.interpolate(flow, (height, width), mode="bilinear", align_corners=False)
    scale = full.new_tensor([width / flow.shape[-1], height / flow.shape[-2]]).view(2, 1, 1)
    y, x = torch.meshgrid(
        torch.arange(height, device=flow.device), torch.arange(width, device=flow.device), indexing="ij"
    )
    to = (torch.stack([x, y]) + full * scale).round().long()
    inside = (to[:, 0] >= 0) & (to[:, 0] < width) & (to[:, 1] >= 0) & (to[:, 1] < height)
    row, column = to[:, 1].clamp(0, height - 1), to[:, 0].clamp(0, width - 1)
    batch = torch.arange(len(flow), device=flow.device).view(-1, 1, 1)
    return source_mask[batch, row, column] * inside


def _by_alpha(values: dict[float, float]) -> dict[str, float | None]:
    return {str(alpha): or_none(value) for alpha, value in values.items()}
