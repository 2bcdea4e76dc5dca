"""The precision of the strategy `xla`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fairlead import PrecisionConfigBase, Resolution, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead_precision.modes import StrategyPrecision


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
    engines = (*LIGHTNING, "torch-xla")
    extra = "xla"
    reason = "it steps the optimizer through torch-xla, which needs an XLA device"
    unproven = Inexact(
        "precision: xla with 16-true",
        why="no test has resumed a run in float16 on XLA devices",
        fix="precision: bf16-true or 32-true, where it matters",
        certain=False,
    )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Tests have resumed runs in 32 bits and in bfloat16."""
        if getattr(resolution.precision, "precision", None) == "16-true":
            yield self.unproven


xla = XLAPrecision()
