"""8-bit floating point by NVIDIA's Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from fairlead import BuildContext, Capability, Finding, PrecisionConfigBase, Resolution, hookimpl
from fairlead.config_bases import ConfigModel
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead_precision.hardware import refuse_without_fp8, without_fp8
from fairlead_precision.modes import Half, UnprovenPrecision, lightning_precisions
from fairlead_runs.device_models import AMD, find_device


class FP8Recipe(ConfigModel):
    """How 8-bit values are scaled: Transformer Engine's `DelayedScaling`, with its defaults."""

    margin: int = 0
    """Powers of two left free above the largest value seen."""
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    """`HYBRID`: E4M3 forward, E5M2 for gradients, which need more range."""
    amax_history_len: int = Field(1024, gt=0)
    """Steps whose largest values are remembered."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Scale by the largest value remembered, or the last."""


class TransformerEnginePrecisionConfig(PrecisionConfigBase):
    """8-bit floating point in linear layers, by NVIDIA's Transformer Engine; H100-class GPUs."""

    name: Literal["transformer-engine"] = "transformer-engine"
    weights_dtype: Half = "bfloat16"
    """Format of the weights."""
    replace_layers: bool | None = None
    """Replace `Linear` and `LayerNorm` by Transformer Engine's; None does, unless the model has some of them; False:
    the model is built of them."""
    recipe: FP8Recipe | None = None
    """How values are scaled; None is Transformer Engine's default."""
    fallback_compute_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """What operations without 8-bit support compute in; None: `weights_dtype`."""


class TransformerEngine(UnprovenPrecision):
    """8-bit floating point."""

    config = TransformerEnginePrecisionConfig
    runtime = "fairlead_precision.transformer_engine:build"
    aliases = ("TransformerEnginePluginConfig",)
    engines = (*LIGHTNING, "transformer-engine")
    extra = "transformer-engine"
    unproven = Inexact(
        "precision: transformer-engine",
        why="no test has resumed it: it scales by the largest values of past steps",
        fix="precision: bf16-mixed",
        certain=False,
    )
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
        """Refuses GPUs that are known to have no 8-bit units, and says what to take."""
        names = resolution.devices_found.names
        if amd := sorted({name for name in names if (model := find_device(name)) and model.vendor is AMD}):
            yield Finding(
                "error",
                "precision-fp8",
                f"Transformer Engine does not run on {', '.join(amd)}",
                where="trainer.precision",
                why="it is NVIDIA's library, and drives its GPUs only",
                fix="precision: fp8-torchao",
            )
        elif old := without_fp8(names):
            yield Finding(
                "error",
                "precision-fp8",
                f"{old.names} cannot compute in 8-bit floating point",
                where="trainer.precision",
                why=old.why,
                fix=f"precision: {old.instead}",
            )


def build(config: TransformerEnginePrecisionConfig, context: BuildContext) -> Any:
    """Lightning's plugin, whose constructor imports Transformer Engine; raises where a GPU has no 8-bit units."""
    import torch

    refuse_without_fp8()
    fallback = config.fallback_compute_dtype
    return lightning_precisions(context).TransformerEnginePrecision(
        weights_dtype=getattr(torch, config.weights_dtype),
        recipe=config.recipe.model_dump() if config.recipe else None,
        replace_layers=config.replace_layers,
        fallback_compute_dtype=getattr(torch, fallback) if fallback else None,
    )


transformer_engine = TransformerEngine()
transformer_engine_float16 = TransformerEngine(weights_dtype="float16")
