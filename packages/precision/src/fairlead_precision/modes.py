"""What several precisions share. Loading this module imports no torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast, get_args

from fairlead import BuildContext, Capability, Finding, PrecisionPlugin, Resolution, StrategyPlugin, hookimpl
from fairlead.capabilities import InstalledPlugins
from fairlead.engines import LIGHTNING
from fairlead.errors import ConfigError
from fairlead.findings import Inexact
from fairlead.open_union import parse_backend
from fairlead_precision.hardware import emulated_bfloat16

Half = Literal["float16", "bfloat16"]
Mode = Literal["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
"""The modes of FSDP's and DeepSpeed's precision, under Lightning's names."""


def lightning_precisions(context: BuildContext) -> Any:
    """Lightning's module of precision plugins for the engine: the Trainer's or Fabric's."""
    family = "pytorch" if context.engine == "trainer" else "fabric"
    return importlib.import_module(f"lightning.{family}.plugins.precision")


def build_for_strategy(mode: str, context: BuildContext, scaler: dict[str, Any] | None = None) -> Any | None:
    """What computes a mode under a strategy that accepts its own precision only; None where it takes any.

    It is the same choice as Lightning's own for `precision="bf16-mixed"` and the like.  `scaler` is for `16-mixed`: the
    arguments of the gradient scaler, which the precision finds in `context.extras`.
    """
    strategy = context.resolution.strategy
    tag = cast("StrategyPlugin", context.plugins.of(strategy)).precision
    if tag is None:
        return None
    plugin = cast("PrecisionPlugin", context.plugins.get("precision", tag))
    known = get_args(plugin.config.model_fields["precision"].annotation)
    if mode not in known:
        raise ConfigError(
            f"strategy {strategy.name!r} does not know precision {mode!r}",
            where="trainer.precision",
            fix=f"choose one of: {', '.join(known)}",
        )
    config = parse_backend("precision", {"name": tag, "precision": mode}, context.plugins)
    build = pkgutil.resolve_name(str(plugin.runtime))
    return build(config, replace(context, extras={**context.extras, "scaler": scaler}))


class GeneralPrecision(PrecisionPlugin):
    """A precision of Lightning's that fits every strategy which knows the mode."""

    engines = LIGHTNING
    extra = "lightning"

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """A checkpoint holds the parameters as they are, and the loss scale."""
        return ()


class SixteenBitPrecision(GeneralPrecision):
    """One whose config has a 16-bit `dtype`."""

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Old GPUs emulate bfloat16."""
        config: Any = resolution.precision
        if config.dtype == "bfloat16":
            yield from emulated_bfloat16(resolution)


class UnprovenPrecision(PrecisionPlugin):
    """One for which no test shows whether it resumes exactly."""

    unproven: ClassVar[Inexact]

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """It is not known."""
        yield self.unproven


class StrategyPrecision(UnprovenPrecision):
    """A precision made for the strategies that name it in `StrategyPlugin.precision`."""

    reason: ClassVar[str]
    """Why no other strategy can use it."""

    @hookimpl
    def fairlead_capabilities(self, plugins: InstalledPlugins) -> Iterable[Capability]:
        """Refuses every other strategy that is installed."""
        strategies = plugins.distinct("strategy").items()
        others = tuple(f"strategy.{name}" for name, strategy in strategies if strategy.precision != self.tag)
        fix = "precision: bf16-mixed, or another general name, which fits every strategy"
        yield Capability(f"precision.{self.tag}", others, "no", self.reason, fix)
