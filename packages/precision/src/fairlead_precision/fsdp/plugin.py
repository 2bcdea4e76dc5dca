"""What `precision: fsdp` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fairlead import Capability, PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.fields import LIGHTNING, OTHER_THAN_FSDP
from fairlead_precision.fsdp.config import FSDPPrecisionConfig

__all__ = ["FSDPPrecision", "fsdp"]


class FSDPPrecision(PrecisionPlugin):
    """The precision of the strategy `fsdp`, named outright (R45)."""

    config = FSDPPrecisionConfig
    runtime = "fairlead_precision.fsdp.runtime:build"
    aliases = ("FSDPPrecisionPluginConfig",)
    engines = LIGHTNING
    extra = "lightning"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """It is of use to its own strategy only."""
        yield Capability(
            "precision.fsdp",
            OTHER_THAN_FSDP,
            "no",
            "it is made for FSDP1: it sets the formats of FSDP1's units and computes under CUDA's autocast only",
            "precision: bf16-mixed, or another general name, which fits every strategy",
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Nobody has shown it, so it is not known."""
        yield Inexact(
            "precision: fsdp",
            why="no test has resumed it: it needs GPUs",
            fix="strategy: fsdp2, or ddp",
            certain=False,
        )


fsdp = FSDPPrecision()
