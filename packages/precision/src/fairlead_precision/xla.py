"""The precision of the strategy `xla`."""

from __future__ import annotations

from typing import Literal

from fairlead import PrecisionConfigBase
from fairlead.findings import Inexact
from fairlead_precision.modes import LIGHTNING, StrategyPrecision


class XLAPrecisionConfig(PrecisionConfigBase):
    """The precision of the strategy `xla`, named outright."""

    name: Literal["xla"] = "xla"
    precision: Literal["32-true", "16-true", "bf16-true"] = "32-true"
    """The mode, under Lightning's name. The general names (`precision: bf16-true`) choose it as well."""


class XLAPrecision(StrategyPrecision):
    """The precision of the strategy `xla`, named outright."""

    config = XLAPrecisionConfig
    runtime = "fairlead_precision.xla_runtime:build"
    aliases = ("XLAPluginConfig",)
    engines = (*LIGHTNING, "torch-xla>=2.9")
    extra = "xla"
    reason = "it steps the optimizer through torch-xla, which needs an XLA device"
    unproven = Inexact(
        "precision: xla",
        why="no test has resumed a run on XLA devices",
        fix="accelerator: cpu or cuda, where it matters",
        certain=False,
    )


xla = XLAPrecision()
