"""What `mixed`, `16-mixed` and `bf16-mixed` contribute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from fairlead import Capability, Finding, PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.checks import emulated_bfloat16
from fairlead_precision.fields import LIGHTNING
from fairlead_precision.mixed.config import MixedPrecisionConfig

__all__ = ["MixedPrecision", "mixed", "mixed_16", "mixed_bf16", "mixed_bfloat16", "mixed_float16"]


class MixedPrecision(PrecisionPlugin):
    """Automatic mixed precision."""

    config = MixedPrecisionConfig
    runtime = "fairlead_precision.mixed.runtime:build"
    aliases = ("MixedPrecisionPluginConfig",)
    engines = LIGHTNING
    extra = "lightning"
    codes: ClassVar[Mapping[str, str]] = {
        "precision-scaler": "The strategy does not use the gradient scaler's settings."
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning would change silently."""
        yield Capability(
            "precision.16-mixed",
            ("accelerator.cpu",),
            "no",
            "Lightning has no float16 mixed precision on a CPU and would silently use bfloat16",
            "precision: bf16-mixed",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Old GPUs emulate bfloat16; DeepSpeed scales the loss itself."""
        config = resolution.precision
        assert isinstance(config, MixedPrecisionConfig)
        if config.dtype == "bfloat16":
            yield from emulated_bfloat16(resolution, "trainer.precision", "precision: 16-mixed")
        elif (
            config.scaler() != MixedPrecisionConfig(dtype="float16").scaler()
            and resolution.strategy.name == "deepspeed"
        ):
            yield Finding(
                "error",
                "precision-scaler",
                "DeepSpeed does not use these settings of the loss scale",
                where="trainer.precision",
                why="it scales the loss itself",
                fix="set `loss_scale`, `initial_scale_power` and `loss_scale_window` of the strategy instead",
            )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """Parameters have 32 bits, and the loss scale is in the checkpoint."""
        return ()


mixed = MixedPrecision()
mixed_float16 = MixedPrecision(dtype="float16")
mixed_bfloat16 = MixedPrecision(dtype="bfloat16")
mixed_16 = MixedPrecision(dtype="float16")
mixed_bf16 = MixedPrecision(dtype="bfloat16")
