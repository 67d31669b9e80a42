"""Few-shot segmentation: IoU and boundary accuracy of masks, for several numbers of shots in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vat.errors import VatError
from vat.evaluation.protocol import Batch, Protocol, Record, identity, or_none, percent
from vat.evaluation.tables import PlainTable, number
from vat.metrics import FewShotIoU, boundary_accuracy, intersection_and_union
from vat.model import merge
from vat.self_support import SelfSupport

Masks = dict[int, Tensor]
"""Number of shots -> predicted masks [b, H, W]."""


@dataclass(frozen=True)
class Segmentation(Protocol):
    """`voting` is a rule of `vat.model.merge`; `flip` adds the prediction for the mirrored query and supports;
    `min_radius` is that of `vat.metrics.boundary_accuracy`; with `self_support` every view looks a second time.
    """

    shots: tuple[int, ...] = (1,)
    voting: str = "paper"
    flip: bool = False
    min_radius: int = 3
    self_support: SelfSupport | None = None

    task = "segmentation"
    unit = "episodes"

    def __post_init__(self) -> None:
        if not self.shots or min(self.shots) < 1 or len(set(self.shots)) < len(self.shots):
            raise VatError(f"shots is {list(self.shots)}; give different numbers from 1 up, such as 1,5.")
        merge(torch.zeros(1, 1, 2, 1, 1), self.voting)  # refuses unknown rules before anything is computed

    def check(self, sample: dict[str, Any]) -> None:
        if "query" not in sample:
            raise VatError("This model is for segmentation, but the data set holds pairs without masks to segment.")
        available = len(sample["support"])
        if available < max(self.shots):
            raise VatError(
                f"{max(self.shots)}-shot was asked for, but the episodes have {available} support image(s): "
                "build the data set with as many shots."
            )

    # -- from images to masks --------------------------------------------------------------------------------

    def predict(self, model: Any, batch: Batch) -> list[Masks]:
        """The masks of every group of :func:`truths`, at the size of its truth."""
        return [self.masks(logits) for logits in self.logits(model, batch)]

    def masks(self, logits: dict[int, Tensor]) -> Masks:
        return {shots: merge(votes, self.voting) for shots, votes in logits.items()}

    def logits(self, model: Any, batch: Batch) -> Iterator[dict[int, Tensor]]:
        """Number of shots -> those of all votes [b, V, 2, H, W], for every group of :func:`truths`."""
        query, support = model.normalize(batch["query"]), model.normalize(batch["support"])
        mask = batch["support_mask"].to(query.dtype)
        views = [decoded(model, query, support, mask, self.shots, self.self_support)]
        if self.flip:
            mirrored = query.flip(-1), support.flip(-1), mask.flip(-1)
            views.append(decoded(model, *mirrored, self.shots, self.self_support))
        for rows, truth, _ in truths(batch):
            size = truth.shape[-2:]
            yield {shots: _finished(model, [view[shots][rows] for view in views], size) for shots in self.shots}

    # -- from masks to results -------------------------------------------------------------------------------

    def measure(self, prediction: list[Masks], batch: Batch) -> list[Record]:
        """Counts and boundary accuracy for every number of shots.

        Void pixels count in no IoU. In the boundary accuracy they are background: PASCAL outlines its objects
        with void, so that leaving it out would leave the inner side of every outline alone.
        """
        records: list[Record] = [record | {"shots": {}} for record in identity(batch, ("query_name", "support_names"))]
        for masks, (rows, truth, ignore) in zip(prediction, truths(batch), strict=True):
            for shots, mask in masks.items():
                intersection, union = intersection_and_union(mask, truth, ignore)
                accuracy = boundary_accuracy(mask, truth, self.min_radius)
                counts = zip(intersection.tolist(), union.tolist(), accuracy.double().tolist(), strict=True)
                for record, (both, either, boundary) in zip(records[rows], counts, strict=True):
                    entry = {"intersection": both, "union": either, "mba": or_none(boundary)}
                    record["shots"][str(shots)] = entry
        return records

    def results(self, records: Sequence[Record], classes: dict[int, str]) -> dict[str, Any]:
        """By number of shots (as text, for JSON): `miou`, `fb_iou`, `mba` and `per_class`."""
        return {str(shots): self._results(records, classes, str(shots)) for shots in self.shots}

    def _results(self, records: Sequence[Record], classes: dict[int, str], shots: str) -> dict[str, Any]:
        entries = [record["shots"][shots] for record in records]
        class_ids = torch.tensor([record["class_id"] for record in records])
        iou = CountedIoU(class_ids.tolist(), sync_on_compute=False)
        iou.update(
            torch.tensor([entry["intersection"] for entry in entries]),
            torch.tensor([entry["union"] for entry in entries]),
            class_ids,
        )
        result = iou.compute()
        return {
            "miou": float(result["miou"]),
            "fb_iou": float(result["fb_iou"]),
            "mba": percent(entry["mba"] for entry in entries),
            "per_class": {classes.get(c, str(c)): value for c, value in result["per_class"].items()},
        }

    def headline(self, records: Sequence[Record]) -> str:
        results = self.results(records, {})
        return "mIoU " + ", ".join(f"{results[str(k)]['miou']:.1f} ({k}-shot)" for k in self.shots)

    def quality(self, record: Record) -> float:
        """IoU of the foreground with the most shots."""
        entry = record["shots"][str(max(self.shots))]
        return entry["intersection"][1] / max(entry["union"][1], 1)

    # -- for the eye -----------------------------------------------------------------------------------------

    def tables(self, results: dict[str, Any]) -> list[PlainTable]:
        overall = [
            [f"{k}-shot", *(number(results[str(k)][name]) for name in ("miou", "fb_iou", "mba"))] for k in self.shots
        ]
        names = list(results[str(self.shots[0])]["per_class"])
        per_class = [[name, *(number(results[str(k)]["per_class"][name]) for k in self.shots)] for name in names]
        return [
            PlainTable("Results in percent", ["", "mIoU", "FB-IoU", "mBA"], overall),
            PlainTable("IoU by class", ["class", *(f"{k}-shot" for k in self.shots)], per_class),
        ]


class CountedIoU(FewShotIoU):
    """`FewShotIoU` from the pixel counts of episodes, [N, 2] each, where the masks are gone."""

    def update(self, intersection: Tensor, union: Tensor, class_id: Tensor) -> None:  # type: ignore[override]
        row = torch.searchsorted(self._class_ids, class_id)
        self.intersection.index_add_(0, row, intersection)
        self.union.index_add_(0, row, union)
        self.episodes.index_add_(0, row, torch.ones_like(row))


def decoded(
    model: Any,
    query: Tensor,
    support: Tensor,
    mask: Tensor,
    shots: Sequence[int],
    self_support: SelfSupport | None = None,
) -> dict[int, Tensor]:
    """Number of shots -> decoder outputs [B, V, 2, h, w] of queries [B, 3, H, W], supports [B, K, 3, H, W].

    Queries and supports are encoded once. Where every support votes (V = K), fewer shots are the first votes
    of more; a model that merges its supports (V = 1) is asked again with the first of them. The second look of
    self-support depends on what all of the k shots say, so there is one for each number of shots.
    """
    most = max(shots)
    features = None if self_support is None else model.extract(query)
    seen, known = model.encode_query(query, features), model.encode_support(support[:, :most], mask[:, :most])
    if known.shots == most:
        output = model.decode(seen, known).unflatten(0, (-1, most))
        outputs = {k: output[:, :k] for k in shots}
    else:
        outputs = {k: model.decode(seen, known.first(k)).unsqueeze(1) for k in shots}
    if self_support is None:
        return outputs
    return {k: self_support.logits(model, query, features, seen, output) for k, output in outputs.items()}


def _finished(model: Any, views: list[Tensor], size: Sequence[int]) -> Tensor:
    """Decoder outputs [b, V, 2, h, w], the second view mirrored, -> their mean as logits [b, V, 2, H, W]."""
    votes = views[0].shape[1]
    logits = [model.finish(view.float().flatten(0, 1), size, votes) for view in views]
    return logits[0] if len(logits) == 1 else (logits[0] + logits[1].flip(-1)) / 2


def truths(batch: Batch) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of the batch with their true masks and void pixels [b, H, W]: all rows at once, or one by one
    where masks come at their original sizes.
    """
    if "query_mask_original" not in batch:
        yield slice(None), batch["query_mask"], batch["ignore"]
        return
    for i, (mask, ignore) in enumerate(zip(batch["query_mask_original"], batch["ignore_original"], strict=True)):
        yield slice(i, i + 1), mask[None], ignore[None]
