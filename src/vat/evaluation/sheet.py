"""A picture of the best, the median and the worst episodes, to see what the numbers mean."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from matplotlib.figure import Figure
from torch import Tensor

from vat.data import collate, transfer_points
from vat.evaluation.correspondence import Correspondence, carry_mask
from vat.evaluation.protocol import Batch, Protocol, Record
from vat.evaluation.segmentation import Segmentation, truths
from vat.figures import image_array, plt, tinted

Panel = tuple[str, np.ndarray]
EACH = 3
RIGHT, WRONG = np.array([0.1, 0.8, 0.3]), np.array([0.95, 0.2, 0.2])


def contact_sheet(model: Any, dataset: Any, protocol: Protocol, records: list[Record]) -> bytes:
    """A PNG of best, median and worst episodes, each a row of panels. The chosen ones are predicted again."""
    device = next(model.parameters()).device
    chosen = pick(records, protocol)
    rows: dict[str, list[list[Panel]]] = {}
    for group, members in chosen.items():
        rows[group] = []
        for record in members:
            batch = move_data_to_device(collate([dataset[record["index"]]]), device)
            with torch.inference_mode():
                panels = _panels(model, protocol, batch)
            name = dataset.classes.get(record["class_id"], str(record["class_id"]))
            caption = f"{name}\n{100 * protocol.quality(record):.0f}%, no. {record['index']}"
            rows[group].append([(caption, panels[0][1]), *panels[1:]])
    figure = _figure(rows)
    content = io.BytesIO()
    figure.savefig(content, dpi=80)
    plt.close(figure)
    return content.getvalue()


def pick(records: list[Record], protocol: Protocol, each: int = EACH) -> dict[str, list[Record]]:
    """The records of the best, the middle and the worst episodes; none is shown twice."""
    ranked = sorted(records, key=protocol.quality)
    each = max(1, min(each, len(ranked) // 3))
    middle = (len(ranked) - each) // 2
    groups = {"best": ranked[::-1][:each], "median": ranked[middle : middle + each], "worst": ranked[:each]}
    return groups if len(ranked) >= 3 else {"all": ranked}


def _figure(groups: dict[str, list[list[Panel]]]) -> Figure:
    lines, wide = max(map(len, groups.values())), max(len(row) for rows in groups.values() for row in rows)
    figure = plt.figure(figsize=(1.9 * wide * len(groups), 2.2 * lines + 0.4), layout="constrained")
    parts: np.ndarray = figure.subfigures(1, len(groups), squeeze=False)[0]
    for part, (group, rows) in zip(parts, groups.items(), strict=True):
        part.suptitle(group, fontsize=13, weight="bold")
        axes = part.subplots(lines, wide, squeeze=False)
        for line, row in zip(axes, rows, strict=False):
            for axis, (title, picture) in zip(line, row, strict=True):
                axis.imshow(picture)
                axis.set_title(title, fontsize=8)
        for axis in axes.flat:
            axis.set_axis_off()
    return figure


def _panels(model: Any, protocol: Protocol, batch: Batch) -> list[Panel]:
    if isinstance(protocol, Segmentation):
        return _episode(protocol, protocol.masks(next(protocol.logits(model, batch))), batch)
    assert isinstance(protocol, Correspondence)
    prediction = protocol.predict(model, batch)
    return _transfer(prediction, batch) if "target_mask" in batch else _points(protocol, prediction, batch)


def _episode(protocol: Segmentation, masks: dict[int, Tensor], batch: Batch) -> list[Panel]:
    shots, query = max(protocol.shots), batch["query"][0]
    truth, mask = next(truths(batch))[1], masks[shots]
    truth, mask = (F.interpolate(m[None].float(), query.shape[-2:], mode="nearest")[0, 0] for m in (truth, mask))
    return [
        ("support", tinted(batch["support"][0, 0], batch["support_mask"][0, 0])),
        ("query", image_array(query)),
        ("truth", tinted(query, truth)),
        (f"prediction, {shots}-shot", tinted(query, mask)),
    ]


def _transfer(flow: Tensor, batch: Batch) -> list[Panel]:
    target = batch["target"][0]
    return [
        ("source", tinted(batch["source"][0], batch["source_mask"][0])),
        ("target", image_array(target)),
        ("truth", tinted(target, batch["target_mask"][0])),
        ("carried over", tinted(target, carry_mask(flow, batch["source_mask"])[0])),
    ]


def _points(protocol: Correspondence, flow: Tensor, batch: Batch) -> list[Panel]:
    """Green where a point counts as correct."""
    count, alpha = int(batch["n_points"][0]), protocol.shown_alpha
    given, truth = (batch[f"{side}_kps"][0, :count].cpu().numpy() for side in ("target", "source"))
    moved = transfer_points(flow, batch["target_kps"], batch["target"].shape[-1])[0, :count].cpu().numpy()
    near = np.linalg.norm(moved - truth, axis=1) <= alpha * float(batch["pck_threshold"][0])
    colours = [RIGHT if correct else WRONG for correct in near]
    target, source = image_array(batch["target"][0]), image_array(batch["source"][0])
    return [
        ("target", _dotted(target, given, colours)),
        ("source with the truth", _dotted(source, truth, colours)),
        (f"prediction, alpha {alpha}", _dotted(source, moved, colours)),
    ]


def _dotted(picture: np.ndarray, points: np.ndarray, colours: list[np.ndarray]) -> np.ndarray:
    """A picture [H, W, 3] with a disc at every point (x, y), edged in white."""
    picture = picture.copy()
    radius = max(3, picture.shape[0] // 60)
    y, x = np.ogrid[: picture.shape[0], : picture.shape[1]]
    for (px, py), colour in zip(points, colours, strict=True):
        distance = np.hypot(x - px, y - py)
        picture[distance <= radius] = 1.0
        picture[distance <= 0.7 * radius] = colour
    return picture
