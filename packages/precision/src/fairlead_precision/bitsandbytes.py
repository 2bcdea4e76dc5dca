"""Quantised linear layers by bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, model_validator

from fairlead import BuildContext, Capability, PrecisionConfigBase, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.modes import LIGHTNING, UnprovenPrecision, lightning_precisions


class BitsandbytesPrecisionConfig(PrecisionConfigBase):
    """Linear layers with weights of 4 or 8 bits, by bitsandbytes; CUDA GPUs only.

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


class Bitsandbytes(UnprovenPrecision):
    """Quantised linear layers."""

    config = BitsandbytesPrecisionConfig
    runtime = "fairlead_precision.bitsandbytes:build"
    aliases = ("BitsandbytesPluginConfig",)
    engines = (*LIGHTNING, "bitsandbytes>=0.50")
    extra = "bitsandbytes"
    unproven = Inexact(
        "precision: bitsandbytes",
        why="no test has resumed it: weights are quantised again when they are loaded",
        fix="precision: bf16-true",
        certain=False,
    )

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Lightning refuses it off CUDA; strategies say for themselves which precisions they refuse."""
        yield Capability(
            "precision.bitsandbytes",
            ("accelerator.cpu", "accelerator.mps", "accelerator.xla"),
            "no",
            "Lightning supports bitsandbytes on CUDA GPUs only",
            "precision: bf16-true",
        )


def build(config: BitsandbytesPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's plugin, whose constructor imports bitsandbytes."""
    import torch

    return lightning_precisions(context).BitsandbytesPrecision(
        mode=config.mode,
        dtype=getattr(torch, config.dtype) if config.dtype else None,
        ignore_modules=set(config.ignore_modules),
    )


bitsandbytes = Bitsandbytes()
