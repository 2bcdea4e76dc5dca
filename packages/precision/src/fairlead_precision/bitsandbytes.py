"""Quantised linear layers by bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, model_validator

from fairlead import Capability, PrecisionConfigBase, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead_precision.modes import UnprovenPrecision


class BitsandbytesPrecisionConfig(PrecisionConfigBase):
    """Linear layers with weights of 4 or 8 bits, by bitsandbytes; on GPUs, and on a CPU.

    What is not quantised trains: with 4 bits and `int8` biases, norms, embeddings, an adapter, and the layers that
    `ignore_modules` names; with `int8-training` everything.

    Example:
        >>> BitsandbytesPrecisionConfig(mode="int8-training", ignore_modules=("model.lm_head",)).mode
        'int8-training'
    """

    name: Literal["bitsandbytes"] = "bitsandbytes"
    mode: Literal["nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"] = "nf4"
    """How weights are stored: 4-bit NormalFloat or float, frozen, `-dq` with the scales quantised too; `int8` frozen
    in 8 bits; `int8-training` as they were, for the updates, and quantised anew for each forward pass."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """What 4-bit layers compute in; their results have the dtype of what comes in. None: bfloat16 on a GPU that has
    it, float16 on an older one, and on a CPU what comes in. 8-bit layers quantise what comes in, from float16."""
    ignore_modules: tuple[str, ...] = Field((), strict=False)
    """Submodules whose layers stay as they are, such as `model.lm_head`, by their names in the trained module."""
    threshold: float = Field(6.0, ge=0)
    """Of 8-bit layers: input features with a value above it are computed in 16 bits (LLM.int8()); 0: none are. A CPU
    in training computes with what comes in, and has no such features."""

    @model_validator(mode="after")
    def _int8_computes_in_float16(self) -> BitsandbytesPrecisionConfig:
        if self.mode.startswith("int8") and self.dtype not in (None, "float16"):
            raise ValueError(f"mode {self.mode!r} computes in float16 only, not {self.dtype}")
        if not self.mode.startswith("int8") and self.threshold != type(self).model_fields["threshold"].default:
            raise ValueError(f"`threshold` belongs to the int8 modes, not to {self.mode!r}")
        return self


class Bitsandbytes(UnprovenPrecision):
    """Quantised linear layers."""

    config = BitsandbytesPrecisionConfig
    runtime = "fairlead_precision.bitsandbytes_runtime:build"
    aliases = ("BitsandbytesPluginConfig",)
    engines = (*LIGHTNING, "bitsandbytes")
    extra = "bitsandbytes"
    unproven = Inexact(
        "precision: bitsandbytes",
        why="no test has resumed it on a GPU; on a CPU a resumed run ends with the same bits",
        fix="precision: bf16-true",
        certain=False,
    )

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Devices without its kernels; strategies say for themselves which precisions they refuse."""
        yield Capability(
            "precision.bitsandbytes",
            ("accelerator.mps", "accelerator.xla"),
            "no",
            "bitsandbytes has no kernels for it that Fairlead's layers use",
            "precision: bf16-true",
        )
        yield Capability(
            "precision.bitsandbytes",
            ("accelerator.cpu",),
            "yes",
            "it quantises and trains there with the same layers as on a GPU; slower than 32 bits",
        )


bitsandbytes = Bitsandbytes()
nf4 = Bitsandbytes(mode="nf4")
nf4_dq = Bitsandbytes(mode="nf4-dq")
fp4 = Bitsandbytes(mode="fp4")
fp4_dq = Bitsandbytes(mode="fp4-dq")
int8 = Bitsandbytes(mode="int8")
int8_training = Bitsandbytes(mode="int8-training")
