"""What `64-true` contributes."""

from __future__ import annotations

from collections.abc import Iterable

from fairlead import Capability, PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.double.config import DoublePrecisionConfig
from fairlead_precision.fields import LIGHTNING

__all__ = ["Double", "double", "double_64"]


class Double(PrecisionPlugin):
    """64-bit numbers."""

    config = DoublePrecisionConfig
    runtime = "fairlead_precision.double.runtime:build"
    aliases = ("DoublePrecisionPluginConfig",)
    engines = LIGHTNING
    extra = "lightning"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Devices without 64-bit numbers; strategies say for themselves which they refuse."""
        yield Capability(
            "precision.64-true", ("accelerator.mps",), "no", "MPS has no 64-bit floating point", "precision: 32-true"
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """A checkpoint holds 64-bit numbers as they are."""
        return ()


double = Double()
double_64 = Double(name="64")  # a preset that only is another name
