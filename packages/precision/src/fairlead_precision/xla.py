"""The precision of the strategy `xla`."""

from __future__ import annotations

from typing import Any, Literal

from fairlead import BuildContext, PrecisionConfigBase
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead_precision.modes import StrategyPrecision, lightning_precisions


class XLAPrecisionConfig(PrecisionConfigBase):
    """The precision of the strategy `xla`, named outright."""

    name: Literal["xla"] = "xla"
    precision: Literal["32-true", "16-true", "bf16-true"] = "32-true"
    """The mode, under Lightning's name. The general names (`precision: bf16-true`) choose it as well."""


class XLAPrecision(StrategyPrecision):
    """The precision of the strategy `xla`, named outright."""

    config = XLAPrecisionConfig
    runtime = "fairlead_precision.xla:build"
    aliases = ("XLAPluginConfig",)
    engines = (*LIGHTNING, "torch-xla")
    extra = "xla"
    reason = "it steps the optimizer through torch-xla, which needs an XLA device"
    unproven = Inexact(
        "precision: xla",
        why="no test has resumed a run on XLA devices",
        fix="accelerator: cpu or cuda, where it matters",
        certain=False,
    )


def build(config: XLAPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's plugin for the mode."""
    return lightning_precisions(context).XLAPrecision(config.precision)


xla = XLAPrecision()
