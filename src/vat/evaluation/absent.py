"""Queries that do not show the class of their supports: how much is masked although nothing should be.

An empty truth has no IoU, and by the standard protocol every false pixel would count against the class; so these
episodes are evaluated by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vat.evaluation.protocol import Batch, Record, identity, percent
from vat.evaluation.segmentation import Masks, Segmentation, truths
from vat.evaluation.tables import PlainTable, number

TOLERATED = 0.01
"""Share of a photo that may be masked by mistake before the photo counts as mistaken."""


@dataclass(frozen=True)
class FalseMasks(Segmentation):
    """`masked`: mean share of a photo's pixels that are masked wrongly; `photos`: share of photos with over 1 %."""

    def measure(self, prediction: list[Masks], batch: Batch) -> list[Record]:
        """The share of masked pixels for every number of shots; void pixels, and what does show the class, are left
        out.
        """
        records: list[Record] = [record | {"shots": {}} for record in identity(batch, ("query_name", "support_names"))]
        for masks, (rows, truth, ignore) in zip(prediction, truths(batch), strict=True):
            counted = ~(ignore.bool() | truth.bool())
            for shots, mask in masks.items():
                wrong = (mask.bool() & counted).flatten(1).sum(1).double()
                shares = wrong / counted.flatten(1).sum(1).clamp(min=1)
                for record, share in zip(records[rows], shares.tolist(), strict=True):
                    record["shots"][str(shots)] = {"masked": share}
        return records

    def _results(self, records: Sequence[Record], classes: dict[int, str], shots: str) -> dict[str, Any]:
        shares = [record["shots"][shots]["masked"] for record in records]
        return {"masked": percent(shares), "photos": percent(float(share > TOLERATED) for share in shares)}

    def headline(self, records: Sequence[Record]) -> str:
        results = self.results(records, {})
        return "masked wrongly " + ", ".join(f"{results[str(k)]['masked']:.2f} % ({k}-shot)" for k in self.shots)

    def quality(self, record: Record) -> float:
        """The share of the photo that is left alone, with the most shots."""
        return 1 - float(record["shots"][str(max(self.shots))]["masked"])

    def tables(self, results: dict[str, Any]) -> list[PlainTable]:
        rows = [[f"{k}-shot", *(number(results[str(k)][name]) for name in ("masked", "photos"))] for k in self.shots]
        columns = ["", "of the photo masked wrongly", "photos with more than 1 % masked"]
        return [PlainTable("Queries without the class, in percent", columns, rows)]
