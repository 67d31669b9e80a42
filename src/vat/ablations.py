"""The rows of the paper's table "Ablation study for VAT", as overrides of the full network.

vat.create_model("vat_resnet50.fss", **COMPONENTS["III"])
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vat.config import PUBLISHED_LEVELS

HSNET_MIX_DEPTHS = (0, 3, 3)  # coarse to fine: there is nothing to mix into the coarsest level

_PLAIN: dict[str, Any] = {"gpp": False, "decoder": "hsnet", "carry_unused": False}
COMPONENTS: dict[str, dict[str, Any]] = {
    "I": _PLAIN | {"embedding": "vem", "aggregator": "none"},
    "II": _PLAIN | {"embedding": "vem"},
    "III": _PLAIN,
    "IV": _PLAIN | {"aggregator": "none"},
    "V": _PLAIN
    | {
        "aggregator": "hsnet_mix",
        "gpp": True,
        "residual": False,
        "levels": tuple(
            replace(level, depth=depth) for level, depth in zip(PUBLISHED_LEVELS, HSNET_MIX_DEPTHS, strict=True)
        ),
    },
    "VI": _PLAIN | {"gpp": True},
    "VII": {},
}
"""I: VEM and HSNet's decoder. II: with the 4D Swin transformer. III: VCM instead of VEM. IV: VCM alone. V: IV
with HSNet's 4D mix. VI: III with GPP. VII: with the ATD, which is VAT."""
