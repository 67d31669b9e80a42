"""The examples of a run, in whichever of three ways they are given."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vat import builtin
from vat.errors import VatError
from vat.predict.supports import Supports, read_supports

if TYPE_CHECKING:
    from vat.segmenter import Segmenter


@dataclass
class Examples:
    """What to look for: pairs of photos and masks by class, or a file that `Segmenter.save` wrote."""

    pairs: Supports
    fitted: Path | None
    model: str
    size: int | None
    device: str
    batch_size: int | None

    @classmethod
    def given(
        cls,
        images: list[Path],
        masks: list[Path],
        class_name: str,
        supports: Path | None,
        fitted: Path | None,
        model: str | None,
        size: int | None,
        device: str,
        batch_size: int | None,
    ) -> Examples:
        """Exactly one of the three ways to give examples."""
        ways = [bool(images or masks), supports is not None, fitted is not None]
        if not any(ways):
            raise VatError("There are no examples: give --support with --mask, --supports, or --fitted.")
        if sum(ways) > 1:
            raise VatError("Give the examples in one way: --support with --mask, --supports, or --fitted.")
        if fitted is not None and (model is not None or size is not None):
            raise VatError(f"{fitted} belongs to the model and size it was made with; leave --model and --size out.")
        if len(images) != len(masks):
            raise VatError(f"There are {len(images)} --support and {len(masks)} --mask; give one mask for each photo.")
        pairs: Supports = {class_name: list(zip(images, masks, strict=True))} if images else {}
        if supports is not None:
            pairs = read_supports(supports)
        return cls(pairs, fitted, model or builtin.SEGMENTER, size, device, batch_size)

    @property
    def classes(self) -> list[str]:
        return list(self.pairs) or self.segmenter.classes

    @cached_property
    def segmenter(self) -> Segmenter:
        """Made when it is first needed: where all is done already, no model is loaded."""
        from vat.segmenter import Segmenter

        if self.fitted is not None:
            return Segmenter.load(self.fitted, self.device, batch_size=self.batch_size)
        made = Segmenter(self.model, self.device, image_size=self.size, batch_size=self.batch_size)
        return made.fit(self.pairs)

    def files(self) -> list[Path]:
        """All files that must not be overwritten."""
        parts = (as_file(part) for pairs in self.pairs.values() for pair in pairs for part in pair)
        return [part for part in parts if isinstance(part, Path)]

    def content(self) -> list[Any]:
        """What results depend on, for a fingerprint: files stand for their content, not for their names."""
        if self.fitted is not None:
            return [self.fitted]
        model = builtin.path(self.model) if builtin.is_builtin(self.model) else as_file(self.model)
        pairs = {name: [[as_file(part) for part in pair] for pair in pairs] for name, pairs in self.pairs.items()}
        return [model, self.size, list(pairs), pairs]


def as_file(part: Any) -> Any:
    """The path of a file; anything else as it is."""
    return Path(part) if isinstance(part, (str, os.PathLike)) and Path(part).is_file() else part
