"""The precision of the strategy `fsdp`."""

from __future__ import annotations

from typing import Any, Literal

from fairlead import BuildContext, PrecisionConfigBase
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead_precision.modes import Mode, StrategyPrecision, lightning_precisions


class FSDPPrecisionConfig(PrecisionConfigBase):
    """The precision of the strategy `fsdp`, named outright."""

    name: Literal["fsdp"] = "fsdp"
    precision: Mode = "32-true"
    """The mode, under Lightning's name. The general names (`precision: bf16-true`) choose it as well."""


class FSDPPrecision(StrategyPrecision):
    """The precision of the strategy `fsdp`, named outright."""

    config = FSDPPrecisionConfig
    runtime = "fairlead_precision.fsdp:build"
    aliases = ("FSDPPrecisionPluginConfig",)
    engines = LIGHTNING
    extra = "lightning"
    reason = "it is made for FSDP1: it sets the formats of FSDP1's units"
    unproven = Inexact(
        "precision: fsdp", why="no test has resumed it: it needs GPUs", fix="strategy: fsdp2, or ddp", certain=False
    )


def build(config: FSDPPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's plugin for the mode; in `16-mixed` with the gradient scaler that is requested."""
    plugin = lightning_precisions(context).FSDPPrecision(config.precision)
    scaler = context.extras.get("scaler")
    if scaler:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        plugin.scaler = ShardedGradScaler(**scaler)  # Lightning's constructor refuses one in every mode
    return plugin


fsdp = FSDPPrecision()
