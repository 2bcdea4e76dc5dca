"""32-bit numbers throughout."""

from __future__ import annotations

from typing import Any, Literal

from fairlead import BuildContext, PrecisionConfigBase
from fairlead_precision.modes import GeneralPrecision, build_for_strategy, lightning_precisions


class FullPrecisionConfig(PrecisionConfigBase):
    """32-bit parameters and computation: the default."""

    name: Literal["32-true"] = "32-true"


class Full(GeneralPrecision):
    """32-bit numbers; works with every strategy."""

    config = FullPrecisionConfig
    runtime = "fairlead_precision.full:build"


def build(config: FullPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's precision plugin for the resolved strategy."""
    return build_for_strategy(config.name, context) or lightning_precisions(context).Precision()


full = Full()
full_32 = Full(name="32")  # a preset that only is another name
