"""A VAT of the published structure at a hundredth of its size, for tests of behaviour."""

from typing import Any

import torch

import vat
from vat.config import LevelConfig, StageConfig

LEVELS = (
    LevelConfig(5, 4, (16, 32), ((2, 1), (1, 2)), (1, 2), depth=2),
    LevelConfig(4, 8, (16, 32), ((2, 2), (1, 2)), (1, 2), depth=2),
    LevelConfig(3, 16, (16, 32, 32), ((2, 2), (1, 2), (1, 2)), (1, 2, 2), depth=2),
)
STAGES = (StageConfig(8, 4, 16, 24), StageConfig(16, 3, 8, 16), StageConfig(32, 2, 8, None))
PAIR_STAGES = (StageConfig(8, 5, 16, 24), StageConfig(8, 4, 8, 16), StageConfig(8, 3, 8, None))


def small(seed: int = 0, **overrides: Any) -> vat.VAT:
    """Segmentation by default; `task="correspondence"` gives the other head."""
    settings: dict[str, Any] = {
        "backbone": "resnet18",
        "levels": LEVELS,
        "stages": STAGES,
        "appearance_grid": 32,
        "window": 2,
        "decoder_window": 4,
        "image_size": 96,
    }
    if overrides.get("task") == "correspondence":
        settings |= {
            "stages": PAIR_STAGES,
            "heads": 1,
            "decoder_heads": 1,
            "position_embedding": True,
            "frozen_backbone": False,
        }
    torch.manual_seed(seed)
    model = vat.create_model("vat", **(settings | overrides))
    assert isinstance(model, vat.VAT)
    return model


def episode(batch: int = 1, shots: int = 1, size: int = 96, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Normalised query [B, 3, S, S], support [B, K, 3, S, S], mask [B, K, S, S]."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, 3, size, size, generator=generator)
    support = torch.randn(batch, shots, 3, size, size, generator=generator)
    mask = (torch.rand(batch, shots, size, size, generator=generator) > 0.6).float()
    return query, support, mask
