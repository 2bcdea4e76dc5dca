"""The precision of the strategy `deepspeed`."""

from __future__ import annotations

from typing import Any, Literal

from fairlead import BuildContext, PrecisionConfigBase
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead_precision.modes import Mode, StrategyPrecision, lightning_precisions


class DeepSpeedPrecisionConfig(PrecisionConfigBase):
    """The precision of the strategy `deepspeed`, named outright."""

    name: Literal["deepspeed"] = "deepspeed"
    precision: Mode = "32-true"
    """The mode, under Lightning's name. The general names (`precision: bf16-true`) choose it as well."""


class DeepSpeedPrecision(StrategyPrecision):
    """The precision of the strategy `deepspeed`, named outright."""

    config = DeepSpeedPrecisionConfig
    runtime = "fairlead_precision.deepspeed:build"
    aliases = ("DeepSpeedPluginConfig",)
    engines = (*LIGHTNING, "deepspeed")
    extra = "deepspeed"
    reason = "it hands backward and step to DeepSpeed's engine, which no other strategy has"
    unproven = Inexact(
        "precision: deepspeed",
        why="no test has resumed it: DeepSpeed keeps the state itself",
        fix="strategy: fsdp2, or ddp",
        certain=False,
    )


def build(config: DeepSpeedPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's plugin for the mode. DeepSpeed scales the loss itself."""
    return lightning_precisions(context).DeepSpeedPrecision(config.precision)


deepspeed = DeepSpeedPrecision()
