"""What `32-true` contributes."""

from __future__ import annotations

from collections.abc import Iterable

from fairlead import PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.fields import LIGHTNING
from fairlead_precision.full.config import FullPrecisionConfig

__all__ = ["Full", "full", "full_32"]


class Full(PrecisionPlugin):
    """32-bit numbers; works with every strategy."""

    config = FullPrecisionConfig
    runtime = "fairlead_precision.full.runtime:build"
    engines = LIGHTNING
    extra = "lightning"

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """A checkpoint holds 32-bit numbers as they are."""
        return ()


full = Full()
full_32 = Full(name="32")  # a preset that only is another name
