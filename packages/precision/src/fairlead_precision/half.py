"""16-bit numbers throughout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fairlead import BuildContext, Capability, PrecisionConfigBase, hookimpl
from fairlead_precision.modes import Half, SixteenBitPrecision, build_for_strategy, lightning_precisions


class HalfPrecisionConfig(PrecisionConfigBase):
    """16-bit parameters and computation: half the memory, at the price of accuracy."""

    name: Literal["half"] = "half"
    dtype: Half = "float16"
    """`float16` has more digits, `bfloat16` the range of 32-bit numbers: it neither overflows nor needs tuning."""


class HalfPrecision(SixteenBitPrecision):
    """16-bit numbers throughout."""

    config = HalfPrecisionConfig
    runtime = "fairlead_precision.half:build"
    aliases = ("HalfPrecisionPluginConfig",)

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Where it runs and loses the numbers."""
        yield Capability(
            "precision.16-true",
            ("accelerator.cpu",),
            "partial",
            "float16 parameters without loss scaling under- and overflow: Adam's default eps of 1e-8 is 0 in float16, "
            "and the first parameter with a zero gradient becomes NaN",
            "precision: bf16-true, or an optimizer with eps=1e-4",
        )


def build(config: HalfPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's precision plugin for the resolved strategy."""
    mode = "16-true" if config.dtype == "float16" else "bf16-true"
    return build_for_strategy(mode, context) or lightning_precisions(context).HalfPrecision(mode)


half = HalfPrecision()
half_float16 = HalfPrecision(dtype="float16")
half_bfloat16 = HalfPrecision(dtype="bfloat16")
