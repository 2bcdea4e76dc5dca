"""The config of `precision: bitsandbytes`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fairlead import PrecisionConfigBase

__all__ = ["BitsandbytesPrecisionConfig"]


class BitsandbytesPrecisionConfig(PrecisionConfigBase):
    """Linear layers with weights of 4 or 8 bits, by bitsandbytes; CUDA GPUs only (R45, R46).

    Example:
        >>> BitsandbytesPrecisionConfig(mode="int8-training", ignore_modules=("lm_head",)).mode
        'int8-training'
    """

    name: Literal["bitsandbytes"] = "bitsandbytes"
    mode: Literal["nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"] = "nf4"
    """How weights are stored: 4-bit NormalFloat or float, `-dq` with the scales quantised too; `int8` for inference,
    `int8-training` with 16-bit weights kept for updates."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """What is computed in. None: float16 for int8, else bfloat16 where the GPU has it."""
    ignore_modules: tuple[str, ...] = Field((), strict=False)
    """Submodules, by the beginning of their name, whose layers stay as they are, such as `lm_head`."""

    @model_validator(mode="after")
    def _int8_computes_in_float16(self) -> BitsandbytesPrecisionConfig:
        if self.mode.startswith("int8") and self.dtype not in (None, "float16"):
            raise ValueError(f"mode {self.mode!r} computes in float16 only, not {self.dtype}")
        return self
