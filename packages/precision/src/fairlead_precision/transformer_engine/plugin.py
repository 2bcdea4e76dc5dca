"""What `precision: transformer-engine` and its preset contribute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from fairlead import Capability, Finding, PrecisionPlugin, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_precision.fields import LIGHTNING
from fairlead_precision.hardware import has_bf16, has_fp8
from fairlead_precision.transformer_engine.config import TransformerEnginePrecisionConfig

__all__ = ["TransformerEngine", "transformer_engine", "transformer_engine_float16"]


class TransformerEngine(PrecisionPlugin):
    """8-bit floating point."""

    config = TransformerEnginePrecisionConfig
    runtime = "fairlead_precision.transformer_engine.runtime:build"
    aliases = ("TransformerEnginePluginConfig",)
    engines = (*LIGHTNING, "transformer-engine>=2.20")
    extra = "transformer-engine"
    codes: ClassVar[Mapping[str, str]] = {"precision-fp8": "The device has no 8-bit floating point units."}

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Transformer Engine is a CUDA library."""
        yield Capability(
            "precision.transformer-engine",
            ("accelerator.cpu", "accelerator.mps", "accelerator.xla"),
            "no",
            "Transformer Engine runs on CUDA GPUs only",
            "precision: bf16-mixed",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Refuses GPUs that are known to have no 8-bit units, and says what to take (R47)."""
        names = resolution.devices_found.names
        old = sorted({name for name in names if has_fp8(name) is False})
        if old:
            instead = "16-mixed" if any(has_bf16(name) is False for name in old) else "bf16-mixed"
            yield Finding(
                "error",
                "precision-fp8",
                f"{', '.join(old)} cannot compute in 8-bit floating point",
                where="trainer.precision",
                why="8-bit units came with compute capability 8.9: H100, L40, RTX 40 and later",
                fix=f"precision: {instead}",
            )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Nobody has shown it, so it is not known."""
        yield Inexact(
            "precision: transformer-engine",
            why="no test has resumed it: it scales by the largest values of past steps",
            fix="precision: bf16-mixed",
            certain=False,
        )


transformer_engine = TransformerEngine()
transformer_engine_float16 = TransformerEngine(weights_dtype="float16")
