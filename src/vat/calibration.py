"""Probabilities that mean what they say: the temperature of a network's logits, found on held-out episodes.

Dividing logits by a temperature T changes no mask at the threshold 0.5, but how sure the network claims to be, which
decides when classes compete for a pixel (Guo et al., 2017). T minimises the mean negative log-likelihood of the true
labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.config import replace
from vat.errors import VatError
from vat.network import PairNetwork

PIXELS_PER_EPISODE = 2048
BINS = 15
SEARCHED = (0.05, 20.0)


@dataclass(frozen=True)
class Calibration:
    """A temperature and what it does: mean negative log-likelihood and expected calibration error (in percent)."""

    temperature: float
    pixels: int
    nll_before: float
    nll_after: float
    ece_before: float
    ece_after: float


@torch.inference_mode()
def collect_margins(network: PairNetwork, episodes: Iterable[dict[str, Any]], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Foreground minus background logit, and label, of pixels drawn from every episode: two vectors.

    `episodes` are samples of `vat.data` (one query each); void pixels are left out.
    """
    device = network.backbone.mean.device
    generator = torch.Generator().manual_seed(seed)
    margins, labels = [], []
    for sample in episodes:
        query, support = (network.normalize(sample[k].to(device)) for k in ("query", "support"))
        logits = network(query[None], support[None], sample["support_mask"].to(device, query.dtype)[None])[0]
        margin = (logits[:, 1] - logits[:, 0]).float().mean(0).cpu().flatten()
        kept = (~sample["ignore"]).flatten().nonzero()[:, 0]
        drawn = kept[torch.randint(len(kept), (PIXELS_PER_EPISODE,), generator=generator)]
        margins.append(margin[drawn])
        labels.append(sample["query_mask"].flatten()[drawn].float())
    if not margins:
        raise VatError("Calibration needs at least one episode.")
    return torch.cat(margins), torch.cat(labels)


def fit_temperature(margins: Tensor, labels: Tensor) -> Calibration:
    """The temperature of least negative log-likelihood, by bisection: the loss is convex in 1/T."""
    margins, labels = margins.double(), labels.double()
    low, high = (1 / bound for bound in reversed(SEARCHED))
    for _ in range(60):
        middle = (low + high) / 2
        slope = ((torch.sigmoid(margins * middle) - labels) * margins).mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    temperature = 2 / (low + high)
    return Calibration(
        temperature,
        len(margins),
        _nll(margins, labels),
        _nll(margins / temperature, labels),
        calibration_error(torch.sigmoid(margins), labels),
        calibration_error(torch.sigmoid(margins / temperature), labels),
    )


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Mean distance in percent between how sure the network is and how often it is right, over equal bins."""
    bins = (probabilities * BINS).long().clamp(max=BINS - 1)
    counts = torch.bincount(bins, minlength=BINS).double()
    claimed = torch.bincount(bins, probabilities.double(), minlength=BINS)
    found = torch.bincount(bins, labels.double(), minlength=BINS)
    return float(100 * (claimed - found).abs().sum() / counts.sum())


def with_temperature(network: PairNetwork, temperature: float) -> PairNetwork:
    """The same network, its configuration telling the temperature."""
    if not hasattr(network.config, "temperature"):
        raise VatError(f"Models of the family {network.family!r} keep no temperature.")
    network.config = replace(network.config, temperature=temperature)
    return network


def _nll(margins: Tensor, labels: Tensor) -> float:
    return float(F.binary_cross_entropy_with_logits(margins, labels))
