"""Queries that do not show the class of their supports: how much is masked although nothing should be, and whether the
network's confidence tells them from those that do.

An empty truth has no IoU, and by the standard protocol every false pixel would count against the class; so these
episodes are evaluated by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vat.evaluation.protocol import Batch, Record, identity, percent
from vat.evaluation.segmentation import Segmentation, truths
from vat.evaluation.tables import PlainTable, number

TOLERATED = 0.01
"""Share of a photo that may be masked by mistake before the photo counts as mistaken."""
KEPT = 95.0
"""Percent of the photos with the thing that a least confidence is to keep."""


@dataclass(frozen=True)
class FalseMasks(Segmentation):
    """Of queries without the class, `masked`: mean share of a photo's pixels that are masked wrongly; `photos`: share
    of photos with over 1 %. Where some queries show it, `told_apart`: how often a photo that does has more confidence
    than one that does not (area under the ROC curve); `least`: the confidence that 95 % of the former reach, and
    `passing`: the share of the latter that reach it too.
    """

    def predict(self, model: Any, batch: Batch) -> Any:
        """Masks, and the confidence [b] of each, in groups of :func:`truths`."""
        return [
            (self.masks(logits), {shots: confidence(votes, model.temperature) for shots, votes in logits.items()})
            for logits in self.logits(model, batch)
        ]

    def measure(self, prediction: Any, batch: Batch) -> list[Record]:
        """The confidence and the share of masked pixels for every number of shots; void pixels, and what does show the
        class, are left out.
        """
        records: list[Record] = [record | {"shots": {}} for record in identity(batch, ("query_name", "support_names"))]
        for record, absent in zip(records, batch["absent"].tolist(), strict=True):
            record["absent"] = absent
        for (masks, sure), (rows, truth, ignore) in zip(prediction, truths(batch), strict=True):
            counted = ~(ignore.bool() | truth.bool())
            for shots, mask in masks.items():
                wrong = (mask.bool() & counted).flatten(1).sum(1).double()
                shares = wrong / counted.flatten(1).sum(1).clamp(min=1)
                found = zip(records[rows], shares.tolist(), sure[shots].tolist(), strict=True)
                for record, share, confident in found:
                    record["shots"][str(shots)] = {"masked": share, "confidence": confident}
        return records

    def _results(self, records: Sequence[Record], classes: dict[int, str], shots: str) -> dict[str, Any]:
        groups: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for record in records:
            groups[record["absent"]].append(record["shots"][shots])
        shares = [entry["masked"] for entry in groups[True]]
        results = {"masked": percent(shares), "photos": percent(float(share > TOLERATED) for share in shares)}
        if not groups[False]:
            return results
        present, absent = (np.array([entry["confidence"] for entry in groups[key]]) for key in (False, True))
        least = float(np.percentile(present, 100 - KEPT, method="lower"))
        passing = percent((absent >= least).astype(float).tolist())
        return results | {"told_apart": told_apart(present, absent), "least": 100 * least, "passing": passing}

    def headline(self, records: Sequence[Record]) -> str:
        results = self.results(records, {})
        return "masked wrongly " + ", ".join(f"{number(results[str(k)]['masked'])} % ({k}-shot)" for k in self.shots)

    def quality(self, record: Record) -> float:
        """The share of the photo that is left alone, with the most shots."""
        return 1 - float(record["shots"][str(max(self.shots))]["masked"])

    def tables(self, results: dict[str, Any]) -> list[PlainTable]:
        rows = [[f"{k}-shot", *(number(results[str(k)][name]) for name in ("masked", "photos"))] for k in self.shots]
        columns = ["", "of the photo masked wrongly", "photos with more than 1 % masked"]
        tables = [PlainTable("Queries without the class, in percent", columns, rows)]
        if "told_apart" in results[str(self.shots[0])]:
            names = ("told_apart", "least", "passing")
            rows = [[f"{k}-shot", *(number(results[str(k)][name]) for name in names)] for k in self.shots]
            columns = [
                "",
                "told apart (AUC)",
                f"confidence of {KEPT:.0f} % with it",
                "without it that reach that",
            ]
            tables.append(PlainTable("Photos with and without the class by confidence, in percent", columns, rows))
        return tables


def confidence(logits: Tensor, temperature: float) -> Tensor:
    """The greatest probability of a pixel to be foreground, [B], of logits of all votes [B, V, 2, H, W]."""
    margins = (logits[:, :, 1] - logits[:, :, 0]) / temperature
    return margins.sigmoid().mean(1).flatten(1).amax(1)


def told_apart(present: np.ndarray, absent: np.ndarray) -> float | None:
    """How often a value of the first is greater than one of the second, in percent; ties count half."""
    if not len(present) or not len(absent):
        return None
    return float(50 * (1 + np.sign(present[:, None] - absent)).mean())
