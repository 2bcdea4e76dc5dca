"""The general modes under the name that Lightning has for the precision of FSDP."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from typing import Any, Literal

from fairlead import BuildContext, Capability, PrecisionConfigBase, hookimpl
from fairlead.capabilities import InstalledPlugins
from fairlead.open_union import parse_backend
from fairlead_precision.modes import GeneralPrecision, Mode


class FSDPPrecisionConfig(PrecisionConfigBase):
    """The precision of the strategy `fsdp`, named outright: `{name: fsdp, precision: bf16-mixed}` is `bf16-mixed`."""

    name: Literal["fsdp"] = "fsdp"
    precision: Mode = "32-true"
    """The mode, under Lightning's name."""


class FSDPPrecision(GeneralPrecision):
    """The precision of the strategy `fsdp`, named outright."""

    config = FSDPPrecisionConfig
    runtime = "fairlead_precision.fsdp:build"
    aliases = ("FSDPPrecisionPluginConfig",)

    @hookimpl
    def fairlead_capabilities(self, plugins: InstalledPlugins) -> Iterable[Capability]:
        """Other strategies do not know all of its modes."""
        others = tuple(f"strategy.{name}" for name in plugins.distinct("strategy") if name != "fsdp")
        reason = "it names a mode for strategy: fsdp, and other strategies do not know all of them"
        yield Capability("precision.fsdp", others, "no", reason, "precision: bf16-mixed, or another general name")


def build(config: FSDPPrecisionConfig, context: BuildContext) -> Any:
    """What the general name of the mode builds."""
    general = parse_backend("precision", config.precision, context.plugins)
    runtime = context.plugins.of(general).runtime
    return pkgutil.resolve_name(str(runtime))(general, context)


fsdp = FSDPPrecision()
