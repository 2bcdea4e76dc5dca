"""64-bit numbers throughout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fairlead import BuildContext, Capability, PrecisionConfigBase, hookimpl
from fairlead_precision.modes import GeneralPrecision, build_for_strategy, lightning_precisions


class DoublePrecisionConfig(PrecisionConfigBase):
    """64-bit parameters and gradients: slow, for telling rounding from a mistake."""

    name: Literal["64-true"] = "64-true"


class Double(GeneralPrecision):
    """64-bit numbers."""

    config = DoublePrecisionConfig
    runtime = "fairlead_precision.double:build"
    aliases = ("DoublePrecisionPluginConfig",)

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Devices without 64-bit numbers; strategies say for themselves which they refuse."""
        yield Capability(
            "precision.64-true", ("accelerator.mps",), "no", "MPS has no 64-bit floating point", "precision: 32-true"
        )


def build(config: DoublePrecisionConfig, context: BuildContext) -> Any:
    """Lightning's precision plugin for the resolved strategy."""
    return build_for_strategy(config.name, context) or lightning_precisions(context).DoublePrecision()


double = Double()
double_64 = Double(name="64")  # a preset that only is another name
