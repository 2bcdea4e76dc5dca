"""The config of `precision: mixed` and its presets `16-mixed` and `bf16-mixed`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from fairlead import PrecisionConfigBase
from fairlead_precision.fields import Half

__all__ = ["MixedPrecisionConfig"]


class MixedPrecisionConfig(PrecisionConfigBase):
    """32-bit parameters, 16-bit computation where that is safe (automatic mixed precision, R44, R45).

    Example:
        >>> MixedPrecisionConfig(dtype="float16", init_scale=1024.0).growth_interval
        2000
    """

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
