"""What `precision: bitsandbytes` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fairlead import Capability, PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.bitsandbytes.config import BitsandbytesPrecisionConfig
from fairlead_precision.fields import LIGHTNING

__all__ = ["Bitsandbytes", "bitsandbytes"]


class Bitsandbytes(PrecisionPlugin):
    """Quantised linear layers."""

    config = BitsandbytesPrecisionConfig
    runtime = "fairlead_precision.bitsandbytes.runtime:build"
    aliases = ("BitsandbytesPluginConfig",)
    engines = (*LIGHTNING, "bitsandbytes>=0.50")
    extra = "bitsandbytes"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Lightning refuses it off CUDA; strategies say for themselves which precisions they refuse."""
        yield Capability(
            "precision.bitsandbytes",
            ("accelerator.cpu", "accelerator.mps", "accelerator.xla"),
            "no",
            "Lightning supports bitsandbytes on CUDA GPUs only",
            "precision: bf16-true",
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Nobody has shown it, so it is not known."""
        yield Inexact(
            "precision: bitsandbytes",
            why="no test has resumed it: weights are quantised again when they are loaded",
            fix="precision: bf16-true",
            certain=False,
        )


bitsandbytes = Bitsandbytes()
