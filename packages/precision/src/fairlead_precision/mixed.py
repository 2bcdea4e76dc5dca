"""Automatic mixed precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, model_validator

from fairlead import BuildContext, Capability, PrecisionConfigBase, hookimpl
from fairlead_precision.modes import Half, SixteenBitPrecision, build_for_strategy, lightning_precisions


class MixedPrecisionConfig(PrecisionConfigBase):
    """32-bit parameters, 16-bit computation where that is safe (automatic mixed precision)."""

    name: Literal["mixed"] = "mixed"
    dtype: Half = "bfloat16"
    """`bfloat16` needs no loss scaling; `float16` is for GPUs without it (V100, T4) and scales the loss."""
    init_scale: float = Field(65536.0, gt=0)
    """The first loss scale of float16. Torch's default."""
    growth_interval: int = Field(2000, gt=0)
    """Steps without an overflow after which the loss scale grows. Torch's default."""
    growth_factor: float = Field(2.0, gt=1)
    """What the loss scale is multiplied by then."""
    backoff_factor: float = Field(0.5, gt=0, lt=1)
    """What it is multiplied by after an overflow."""

    @model_validator(mode="after")
    def _bfloat16_is_not_scaled(self) -> MixedPrecisionConfig:
        if self.dtype == "bfloat16":
            set_ = [n for n, v in self.scaler().items() if v != type(self).model_fields[n].default]
            if set_:
                raise ValueError(f"`{set_[0]}` belongs to float16: bfloat16 is not scaled")
        return self

    def scaler(self) -> dict[str, Any]:
        """The settings of the gradient scaler, under torch's names."""
        names = ("init_scale", "growth_interval", "growth_factor", "backoff_factor")
        return {name: getattr(self, name) for name in names}


class MixedPrecision(SixteenBitPrecision):
    """Automatic mixed precision."""

    config = MixedPrecisionConfig
    runtime = "fairlead_precision.mixed:build"
    aliases = ("MixedPrecisionPluginConfig",)

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


def build(config: MixedPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's precision plugin for the resolved strategy; float16 with the config's gradient scaler."""
    import torch

    mode, scaler = ("16-mixed", config.scaler()) if config.dtype == "float16" else ("bf16-mixed", None)
    own = build_for_strategy(mode, context, scaler)
    if own is not None:
        return own
    device = context.resolution.device_type
    made = torch.amp.GradScaler(device, **scaler) if scaler else None
    return lightning_precisions(context).MixedPrecision(mode, device, made)


mixed = MixedPrecision()
mixed_float16 = MixedPrecision(dtype="float16")
mixed_bfloat16 = MixedPrecision(dtype="bfloat16")
mixed_16 = MixedPrecision(dtype="float16")
mixed_bf16 = MixedPrecision(dtype="bfloat16")
