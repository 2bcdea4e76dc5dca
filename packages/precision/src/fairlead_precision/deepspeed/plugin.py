"""What `precision: deepspeed` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fairlead import Capability, PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.deepspeed.config import DeepSpeedPrecisionConfig
from fairlead_precision.fields import LIGHTNING, OTHER_THAN_DEEPSPEED

__all__ = ["DeepSpeedPrecision", "deepspeed"]


class DeepSpeedPrecision(PrecisionPlugin):
    """The precision of the strategy `deepspeed`, named outright (R45)."""

    config = DeepSpeedPrecisionConfig
    runtime = "fairlead_precision.deepspeed.runtime:build"
    aliases = ("DeepSpeedPluginConfig",)
    engines = (*LIGHTNING, "deepspeed>=0.19.8")
    extra = "deepspeed"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """It is of use to its own strategy only."""
        yield Capability(
            "precision.deepspeed",
            OTHER_THAN_DEEPSPEED,
            "no",
            "it hands backward and step to DeepSpeed's engine, which no other strategy has",
            "precision: bf16-mixed, or another general name, which fits every strategy",
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Nobody has shown it, so it is not known."""
        yield Inexact(
            "precision: deepspeed",
            why="no test has resumed it: DeepSpeed keeps the state itself",
            fix="strategy: fsdp2, or ddp",
            certain=False,
        )


deepspeed = DeepSpeedPrecision()
