"""Which of Lightning's precision plugins computes a mode, given the strategy: the same choice as Lightning's own.

FSDP, DeepSpeed and XLA accept no other plugin than theirs; the others share the general ones.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import precision as fabric
from lightning.pytorch.plugins import precision as trainer

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext

__all__ = ["own_plugin", "precision_plugin"]

_MODES = {
    "fsdp": ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
    "deepspeed": ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
    "xla": ("32-true", "16-true", "bf16-true"),
}
_CLASSES = {"fsdp": "FSDPPrecision", "deepspeed": "DeepSpeedPrecision", "xla": "XLAPrecision"}


def own_plugin(strategy: str, mode: str, context: BuildContext) -> Any:
    """The plugin of a strategy that has one of its own.

    Args:
        strategy: `fsdp`, `deepspeed` or `xla`.
        mode: Lightning's name of the precision, such as `bf16-mixed`.
        context: For the engine.

    Raises:
        ConfigError: The strategy does not know the mode.
    """
    if mode not in _MODES[strategy]:
        raise ConfigError(
            f"strategy {strategy!r} does not know precision {mode!r}",
            where="trainer.precision",
            fix=f"choose one of: {', '.join(_MODES[strategy])}",
        )
    family = trainer if context.engine == "trainer" else fabric
    return getattr(family, _CLASSES[strategy])(mode)


def precision_plugin(mode: str, context: BuildContext, scaler: dict[str, Any] | None = None) -> Any:
    """The plugin for a mode under the resolved strategy.

    Args:
        mode: `32-true`, `64-true`, `16-true`, `bf16-true`, `16-mixed` or `bf16-mixed`.
        context: For engine, strategy and device.
        scaler: Arguments of the gradient scaler, for `16-mixed`.

    Raises:
        ConfigError: The strategy does not know the mode.
    """
    strategy = context.resolution.strategy.name
    if strategy in _CLASSES:
        plugin = own_plugin(strategy, mode, context)
        if strategy == "fsdp" and mode == "16-mixed" and scaler:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            plugin.scaler = ShardedGradScaler(**scaler)  # Lightning's constructor refuses one in every mode
        return plugin
    family = trainer if context.engine == "trainer" else fabric
    if mode == "32-true":
        return family.Precision()
    if mode == "64-true":
        return family.DoublePrecision()
    if mode in ("16-true", "bf16-true"):
        return family.HalfPrecision(mode)
    device = context.resolution.accelerator.name
    if mode == "16-mixed" and scaler:
        import torch

        return family.MixedPrecision(mode, device, torch.amp.GradScaler(device, **scaler))
    return family.MixedPrecision(mode, device)
