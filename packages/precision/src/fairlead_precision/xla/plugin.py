"""What `precision: xla` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fairlead import Capability, PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.fields import LIGHTNING, OTHER_THAN_XLA
from fairlead_precision.xla.config import XLAPrecisionConfig

__all__ = ["XLAPrecision", "xla"]


class XLAPrecision(PrecisionPlugin):
    """The precision of the strategy `xla`, named outright (R45)."""

    config = XLAPrecisionConfig
    runtime = "fairlead_precision.xla.runtime:build"
    aliases = ("XLAPluginConfig",)
    engines = (*LIGHTNING, "torch-xla>=2.9")
    extra = "xla"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """It is of use to its own strategy only."""
        yield Capability(
            "precision.xla",
            OTHER_THAN_XLA,
            "no",
            "it steps the optimizer through torch-xla, which needs an XLA device",
            "precision: bf16-mixed, or another general name, which fits every strategy",
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Nobody has shown it, so it is not known."""
        yield Inexact(
            "precision: xla",
            why="no test has resumed a run on XLA devices",
            fix="accelerator: cpu or cuda, where it matters",
            certain=False,
        )


xla = XLAPrecision()
