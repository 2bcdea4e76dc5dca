"""Builds Lightning's Transformer Engine precision."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins.precision import TransformerEnginePrecision as FabricTransformerEnginePrecision
from lightning.pytorch.plugins.precision import TransformerEnginePrecision

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_precision.hardware import fp8_native
from fairlead_precision.transformer_engine.config import TransformerEnginePrecisionConfig

__all__ = ["build"]


def build(config: TransformerEnginePrecisionConfig, context: BuildContext) -> Any:
    """The plugin; Transformer Engine is imported here.

    Raises:
        ConfigError: This GPU has no 8-bit floating point units.
    """
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if not fp8_native(capability):
            raise ConfigError(
                f"{torch.cuda.get_device_name()} cannot compute in 8-bit floating point",
                where="trainer.precision",
                why=f"its compute capability is {capability[0]}.{capability[1]}; 8.9 is needed (H100-class)",
                fix=f"precision: {'bf16-mixed' if capability >= (8, 0) else '16-mixed'}",
            )
    kind = TransformerEnginePrecision if context.engine == "trainer" else FabricTransformerEnginePrecision
    fallback = config.fallback_compute_dtype
    return kind(
        weights_dtype=getattr(torch, config.weights_dtype),
        recipe=config.recipe.model_dump() if config.recipe else None,
        replace_layers=config.replace_layers,
        fallback_compute_dtype=getattr(torch, fallback) if fallback else None,
    )
